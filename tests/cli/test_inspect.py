"""inspect: a table for people, an object for programs, nothing fetched."""

import json
from pathlib import Path

import pytest

from engine.model.store import Store
from tests.encoders import write_encoder
from tests.tiny import write_checkpoint


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "gemma", "gemma3_text")


def table(out: str) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for line in out.splitlines():
        name, _, text = line.partition("  ")
        lines.setdefault(name, []).append(text.strip())
    return lines


def test_the_table_says_what_it_is_what_it_keeps_and_what_fits(gemma, mlxcel):
    ended = mlxcel("inspect", str(gemma), "-c", "1000", "--parallel", "2")
    assert (ended.code, ended.err) == (0, "")
    said = table(ended.out)
    assert said["model"] == [str(gemma)]
    assert said["layers"] == ["2 x sliding window of 8 tokens", "1 x full attention"]
    assert said["cache"] == ["64 B for each token, 1.0 kB at most in windows and states"]
    assert said["context"] == ["4096 tokens"]
    assert said["tokenizer"] == ["tokenizer.json, with a chat template"]
    assert said["ends with"] == ["<|im_end|> (258)"]
    assert said["decode mode"] == ["found by a probe when the model is first loaded"]
    assert "for 2 slots x 500 tokens" in said["memory"][0]
    assert said["fits"] == ["yes; 2 slots can hold the model's whole context"]


def test_the_object_holds_the_numbers(gemma, mlxcel):
    said = json.loads(mlxcel("inspect", str(gemma), "--json").out)
    assert (said["model_type"], said["path"], said["token_bytes"]) == ("gemma3_text", str(gemma), 64)
    assert said["layers"][0] == {"kind": "window", "count": 2, "token_bytes": 64, "fixed_bytes": 0, "window": 8}
    assert (said["fit"]["num_slots"], said["fit"]["num_tokens"], said["fit"]["fits"]) == (4, 4096, True)
    assert said["fit"]["total_bytes"] == said["weight_bytes"] + 4 * said["fit"]["row_bytes"]
    assert said["end_tokens"] == [{"id": 258, "text": "<|im_end|>"}]


def test_settings_of_the_environment_count_as_for_serve(gemma, mlxcel, monkeypatch):
    monkeypatch.setenv("MLXCEL_PARALLEL", "3")
    assert "3 slots x 1365 tokens" in mlxcel("inspect", str(gemma)).out


def test_what_does_not_fit_is_said_with_the_largest_that_does(gemma, mlxcel):
    said = table(mlxcel("inspect", str(gemma), "--kv-unified", "--parallel", str(10**9)).out)
    assert said["fits"] == ["no; not even one token in 1000000000 slots"]


def test_a_longer_context_than_the_models_is_refused(gemma, mlxcel):
    ended = mlxcel("inspect", str(gemma), "-c", "5000")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: a context of 5000 tokens was asked for, but the model was made for 4096\n"


def test_a_state_is_told_as_one(tmp_path, mlxcel):
    said = table(mlxcel("inspect", str(write_checkpoint(tmp_path, "mamba2"))).out)
    assert said["layers"] == ["2 x state of a fixed size"]
    assert said["cache"] == ["6.0 kB at most in windows and states"]


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("smollm2-135m", "mlxcel pull smollm2-135m fetches what can be fetched"),
        ("someone/something", "mlxcel pull someone/something fetches what can be fetched"),
        ("smollm", "did you mean smollm2-135m?"),
    ],
)
def test_nothing_is_fetched(model, hint, mlxcel):
    ended = mlxcel("inspect", model)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: {model} is not on this machine\nhint: {hint}\n"
    assert Store().list() == []


def test_an_encoder_is_told_as_one(tmp_path, mlxcel):
    said = table(mlxcel("inspect", str(write_encoder(tmp_path / "bert"))).out)
    assert said["gives"] == ["embeddings, and continues nothing"]
    assert said["decode mode"] == ["whole"]
    assert said["cache"] == ["none"]
    assert said["context"] == ["64 tokens"]
