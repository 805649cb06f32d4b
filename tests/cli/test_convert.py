"""convert on the command line: the path or an object on stdout, figures on stderr, refusals by name."""

import json
from pathlib import Path

import pytest

from engine.model.store import Store
from tests.tiny import write_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint two of whose layers cannot be quantized in groups of 64."""
    return write_checkpoint(tmp_path / "tiny", hidden_size=64, intermediate_size=96, head_dim=16)


def test_the_path_is_data_and_the_figures_are_talk(source, mlxcel):
    ended = mlxcel("convert", str(source))
    [entry] = Store().list()
    assert (ended.code, ended.out) == (0, f"{entry.path}\n")
    assert (entry.name, entry.source) == ("local/tiny-4bit", f"{source}, 4 bits, groups of 64")
    *stages, layers, sizes, perplexity, hint = ended.err.splitlines()
    assert stages == [f"measure {source}", f"convert {source}"]
    assert layers == "2 layers not as asked (rows are no whole groups): model.layers.*.mlp.down_proj (2)"
    assert " kB to " in sizes
    assert " bits a weight, in " in sizes
    assert perplexity.startswith("perplexity ")
    assert perplexity.endswith(" times) over 511 tokens")
    assert hint == "mlxcel run tiny-4bit runs it"


def test_the_object_holds_the_figures(source, mlxcel):
    ended = mlxcel("convert", str(source), "small", "--bits", "8", "-g", "32", "--dtype", "float16", "--json")
    assert ended.code == 0
    said = json.loads(ended.out)
    assert said["name"] == "local/small"
    assert said["path"] == str(Store().find("small").path)
    assert (said["bits"], said["group_size"], said["mixed"], said["dtypes"]) == (8, 32, None, ["float16"])
    assert 8 < said["bits_per_weight"] < 10
    assert said["size_bytes"] < said["source_bytes"]
    assert (said["quantized_layers"], said["left_layers"], said["source_was"]) == (15, [], None)
    assert said["perplexity"]["ratio"] == pytest.approx(1, abs=0.1)


def test_nothing_is_measured_where_nobody_wants_it(source, mlxcel):
    ended = mlxcel("convert", str(source), "--no-check", "--json")
    assert json.loads(ended.out)["perplexity"] is None
    assert "perplexity" not in ended.err


def test_what_was_quantized_is_said(source, mlxcel):
    mlxcel("convert", str(source), "--no-check", "-g", "32")
    ended = mlxcel("convert", "tiny-4bit", "again", "--bits", "none")
    assert ended.code == 0
    assert "it was quantized before (4-bit affine, groups of 32): what that had lost stays lost" in ended.err


def test_into_a_folder(source, tmp_path, mlxcel):
    ended = mlxcel("convert", str(source), "-o", str(tmp_path / "out"), "--mixed", "3_6")
    assert (ended.code, ended.out) == (0, f"{tmp_path / 'out'}\n")
    assert Store().list() == []
    ended = mlxcel("convert", str(source), "-o", str(tmp_path / "out"))
    assert ended.code == 1
    assert ended.err == f"error: {tmp_path / 'out'} is there already\nhint: --force replaces a checkpoint\n"
    assert mlxcel("convert", str(source), "-o", str(tmp_path / "out"), "--force").code == 0


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--bits", "7"], 1, "weights are quantized to 2, 3, 4, 5, 6 or 8 bits, not 7"),
        (["--bits", "four"], 2, "'four' is no number of bits"),
        (["--group-size", "16"], 1, "groups of 32, 64 or 128, not 16"),
        (["--mixed", "9"], 1, "the recipe is 2_6, 3_4, 3_6 or 4_6, not 9"),
        (["--dtype", "int4"], 1, "bfloat16, float16 or float32, not int4"),
        (["--max-loss", "0"], 1, "a factor above 0"),
        (["--bits", "4", "--mixed", "3_6"], 2, "leave --bits out"),
        (["--bits", "none", "-g", "32"], 2, "leave --group-size out"),
        (["--no-check", "--max-loss", "2"], 2, "--no-check measures nothing"),
        (["name", "--output", "x"], 2, "give one of them"),
    ],
    ids=str,
)
def test_flags_that_cannot_be_are_refused_before_anything_is_fetched(flags, code, said, mlxcel):
    ended = mlxcel("convert", "nobody/knows", *flags)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err


def test_code_of_a_checkpoint_needs_the_flag(source, mlxcel):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_file": "model.py"}))
    (source / "model.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    ended = mlxcel("convert", str(source))
    assert ended.code == 1
    assert "hint: --trust-remote-code allows it" in ended.err
    assert mlxcel("convert", str(source), "--trust-remote-code").code == 0


def test_an_unknown_model_is_refused_as_everywhere(mlxcel):
    ended = mlxcel("convert", "./nothing")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: there is no ./nothing\nhint: a model is ")


def test_what_it_makes_is_run_by_its_name(source, mlxcel):
    assert mlxcel("convert", str(source), "--no-check").code == 0
    ended = mlxcel("run", "tiny-4bit", "-p", "hello", "-n", "3")
    assert (ended.code, ended.err.split(" by ")[0]) == (0, "(cut at 3 tokens")
