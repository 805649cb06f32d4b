"""A probe's verdict is kept for the checkpoint, the versions and the device that it was found with."""

import json

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from engine import remembered
from engine.cache import adapter
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.forward import Span
from engine.probe import MODES, Verdict, Verdicts, forward_of, probe
from tests.tiny import VOCAB_SIZE, write_checkpoint

VERDICT = Verdict("rows", "rows together equal each alone exactly; spans: layers keep ArraysCache", 123.4)
KERNELS = "portable (as the test says)"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def verdicts(tmp_path):
    return Verdicts(tmp_path / "probes")


def test_a_verdict_is_found_again(checkpoint, verdicts):
    assert verdicts.find(checkpoint, KERNELS) is None
    verdicts.keep(checkpoint, KERNELS, VERDICT)
    assert verdicts.find(checkpoint, KERNELS) == VERDICT


def test_the_last_one_kept_counts_and_nothing_else_is_left(checkpoint, verdicts, tmp_path):
    verdicts.keep(checkpoint, KERNELS, VERDICT)
    verdicts.keep(checkpoint, KERNELS, Verdict("alone", "all others: no", 1.0))
    assert verdicts.find(checkpoint, KERNELS).mode == "alone"
    assert [file.suffix for file in (tmp_path / "probes").iterdir()] == [".json"]


def test_changed_weights_are_probed_again(checkpoint, verdicts):
    verdicts.keep(checkpoint, KERNELS, VERDICT)
    write_checkpoint(checkpoint, seed=1)
    assert verdicts.find(checkpoint, KERNELS) is None


def test_a_changed_configuration_is_probed_again(checkpoint, verdicts):
    verdicts.keep(checkpoint, KERNELS, VERDICT)
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 5.0}))
    assert verdicts.find(checkpoint, KERNELS) is None


@pytest.mark.parametrize("package", ["mlx", "mlx-lm", "mlxcel"])
def test_another_version_is_probed_again(checkpoint, verdicts, monkeypatch, package):
    verdicts.keep(checkpoint, KERNELS, VERDICT)
    version = remembered.importlib.metadata.version
    monkeypatch.setattr(
        remembered.importlib.metadata, "version", lambda name: "0.0.0" if name == package else version(name)
    )
    assert verdicts.find(checkpoint, KERNELS) is None


def test_other_kernels_are_probed_again(checkpoint, verdicts):
    verdicts.keep(checkpoint, KERNELS, VERDICT)
    assert verdicts.find(checkpoint, "native (AVX2, 2 threads)") is None


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"mode": "rows"}',
        b'{"mode": "gone", "reason": "", "tokens_per_s": 1}',
    ],
)
def test_a_file_that_says_nothing_is_as_none(checkpoint, verdicts, tmp_path, written):
    verdicts.keep(checkpoint, KERNELS, VERDICT)
    [file] = (tmp_path / "probes").iterdir()
    file.write_bytes(written)
    assert verdicts.find(checkpoint, KERNELS) is None
    verdicts.keep(checkpoint, KERNELS, VERDICT)
    assert verdicts.find(checkpoint, KERNELS) == VERDICT


def test_a_folder_that_cannot_be_written_is_no_matter(checkpoint, tmp_path):
    (tmp_path / "probes").write_text("a file")
    verdicts = Verdicts(tmp_path / "probes")
    verdicts.keep(checkpoint, KERNELS, VERDICT)
    assert verdicts.find(checkpoint, KERNELS) is None


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_a_kept_verdict_gives_the_same_forward(tmp_path, family):
    adapter.install_attention()
    checkpoint = write_checkpoint(tmp_path / "model", family)
    forward, verdict = probe(load_model(checkpoint)[0], VOCAB_SIZE)
    again = forward_of(load_model(checkpoint)[0], VOCAB_SIZE, verdict)
    assert (type(again), again.name, again.on_grid) == (type(forward), forward.name, forward.on_grid)
    logits = [each.run([Span(each.open(), [1, 2, 3], num_sampled=1)]) for each in (forward, again)]
    assert mx.array_equal(*logits)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_can_be_taken_up_again(tmp_path, mode):
    model = load_model(write_checkpoint(tmp_path / "model"))[0]
    assert mode.startswith(forward_of(model, VOCAB_SIZE, Verdict(mode, "", 1.0)).name)


def test_a_model_that_cannot_be_run_at_all_is_a_model_error(checkpoint, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("[metal_kernel] No Metal back-end.")

    monkeypatch.setattr("mlx_lm.models.llama.MLP.__call__", fail)
    with pytest.raises(ModelError, match=r"cannot be run here: \[metal_kernel\] No Metal back-end"):
        probe(load_model(checkpoint)[0], VOCAB_SIZE)


def test_the_second_start_does_not_probe(checkpoint, monkeypatch):
    first = Engine.open(EngineConfig(model=checkpoint))
    monkeypatch.setattr("engine.probe.probe", None)
    second = Engine.open(EngineConfig(model=checkpoint))
    assert second.verdict == first.verdict
    assert "decode path: spans (rows together equal each alone exactly)" in second.notes
