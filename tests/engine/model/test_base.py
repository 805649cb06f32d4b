"""Checkpoints saved without an output head, as encoders made from decoders are."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine.errors import EmbeddingsOnly
from engine.model.load import load
from tests.embedded import asked, vectors
from tests.engines import Watched
from tests.tiny import write_checkpoint

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 4096}
QWEN3 = SIZES | {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 10000.0,
}


def headless(folder: Path) -> Path:
    """The checkpoint `folder` with the names that its blocks have by themselves, and without a head."""
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    kept = {name.removeprefix("model."): array for name, array in weights.items() if "lm_head" not in name}
    mx.eval(list(kept.values()))
    file.unlink()
    mx.save_safetensors(str(file), kept, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_its_vectors_are_those_of_the_whole_model(tmp_path, family, tied):
    options = {"tie_word_embeddings": tied} | (QWEN3 if family == "qwen3" else {})
    folder = write_checkpoint(tmp_path / "model", "llama" if family == "qwen3" else family, **options)
    expected = vectors(whole := Watched(folder), [asked(whole, "a", 9), asked(whole, "b", 20, "mean")])
    base = Watched(headless(folder))
    assert "embeddings only: the checkpoint has no output head" in base.engine.notes
    got = vectors(base, [asked(base, "a", 9), asked(base, "b", 20, "mean")])
    assert all(map(np.array_equal, got, expected))


def test_it_continues_nothing(tmp_path):
    watched = Watched(headless(write_checkpoint(tmp_path / "model")))
    with pytest.raises(EmbeddingsOnly):
        watched.engine.submit(watched.request("a", 5, 5))


def test_a_whole_checkpoint_continues(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    assert load(folder).continues
    assert "model_type" in json.loads((folder / "config.json").read_text())
