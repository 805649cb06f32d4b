"""A checkpoint that brings Python (its model, its tokenizer, its configuration) runs none of it unless told to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import internlm2

from engine.errors import UntrustedCode
from engine.model.gguf import import_gguf
from engine.model.load import load
from tests.engine.model.tiny_gguf import write_gguf


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a checkpoint whose evil.py leaves a marker; keyword arguments are merged into its JSON files."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def make(**files: dict[str, Any]) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        import_gguf(write_gguf(tmp_path / "m.gguf"), folder)
        marker = f"open({str(tmp_path / 'marker')!r}, 'w').close()\n"
        classes = "class Evil:\n    pass\n\n\nModel = ModelArgs = Evil\n"
        (folder / "evil.py").write_text(marker + classes)
        for name, edits in files.items():
            path = folder / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | edits))
        return folder

    return make


def write_internlm2(folder: Path) -> None:
    """Put a model into `folder` that mlx-lm knows and transformers does not."""
    config = {
        "model_type": "internlm2", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32,
        "num_attention_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 300,
    }  # fmt: skip
    model = internlm2.Model(internlm2.ModelArgs.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "evil.Evil"}}))


def ran(folder: Path) -> bool:
    return (folder.parent / "marker").exists()


def test_107_a_model_file_is_refused_and_not_run(evil: Callable[..., Path]) -> None:
    folder = evil(config={"model_file": "evil.py"})
    with pytest.raises(UntrustedCode, match=r"evil\.py") as caught:
        load(folder)
    assert "--trust-remote-code" in caught.value.hint
    assert not ran(folder)


def test_107_a_model_file_runs_when_it_is_trusted(evil: Callable[..., Path]) -> None:
    folder = evil(config={"model_file": "evil.py"})
    with pytest.raises(Exception, match="from_dict"):
        load(folder, trust_remote_code=True)
    assert ran(folder)


def test_108_a_tokenizer_that_needs_its_own_code_is_refused_and_not_run(evil: Callable[..., Path]) -> None:
    folder = evil(tokenizer_config={"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"})
    write_internlm2(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(UntrustedCode) as caught:
        load(folder)
    assert "--trust-remote-code" in caught.value.hint
    assert not ran(folder)


def test_108_a_tokenizer_that_can_do_without_its_own_code_loads(evil: Callable[..., Path]) -> None:
    folder = evil(tokenizer_config={"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"})
    write_internlm2(folder)
    assert load(folder).tokenizer.encode("hello") != []
    assert not ran(folder)


def test_108_code_that_is_not_needed_is_ignored(evil: Callable[..., Path]) -> None:
    folder = evil(
        config={"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}},
        tokenizer_config={"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}},
    )
    assert load(folder).vocab_size > 0
    assert not ran(folder)
