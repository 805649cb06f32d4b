"""The perplexity is that of mlx-lm's own forward, for any family, and leaves nothing behind."""

import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

from engine.errors import ModelError
from engine.model import perplexity as measuring
from engine.model.perplexity import MOST_TOKENS, TEXT, perplexity
from tests.tiny import write_checkpoint
from tests.zoo import write_zoo


def expected(path: Path) -> float:
    model, tokenizer = mlx_lm.load(str(path))
    ids = mx.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:MOST_TOKENS])
    logits = model(ids[None, :-1])[0].astype(mx.float32)
    return math.exp(nn.losses.cross_entropy(logits, ids[1:], reduction="mean").item())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_it_is_mlx_lms(family: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "tiny", family)
    if not native:
        monkeypatch.setattr(measuring.native, "start", lambda: "not wanted")
    measured = perplexity(path)
    assert measured.num_tokens == MOST_TOKENS - 1
    assert measured.value == pytest.approx(expected(path), rel=1e-3)


@pytest.mark.parametrize("native", [True, False])
def test_quantized_and_half_precision_weights(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_zoo(tmp_path / "tiny", "mixtral")
    weights = mx.load(str(path / "model.safetensors"))
    halves = {name: array.astype(mx.float16) for name, array in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), halves, metadata={"format": "mlx"})
    if not native:
        monkeypatch.setattr(measuring.native, "start", lambda: "not wanted")
    before = mx.get_active_memory()
    value = perplexity(path).value
    assert mx.get_active_memory() - before < 1000
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    assert value == pytest.approx(expected(path), rel=1e-2)


def test_the_text_is_long_enough_and_plain() -> None:
    text = TEXT.read_text(encoding="utf-8")
    assert text.isascii()
    assert 350 < len(text.split()) < 700


def test_a_short_context_bounds_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", max_position_embeddings=100)
    assert perplexity(path).num_tokens == 99


def test_a_damaged_model_is_no_number(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    weights = mx.load(str(path / "model.safetensors"))
    weights["model.norm.weight"] *= float("nan")
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    assert math.isnan(perplexity(path).value)
    weights["model.norm.weight"] = mx.full((32,), 1e6)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    assert perplexity(path).value == math.inf


def test_a_tokenizer_of_another_model_is_said(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", vocab_size=40)
    with pytest.raises(ModelError, match="another model's"):
        perplexity(path)
