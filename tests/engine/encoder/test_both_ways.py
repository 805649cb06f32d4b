"""Decoders whose checkpoints see both ways: every token sees all others, or those of a window around it."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from engine.errors import UnsupportedModel
from engine.model.load import load
from tests.embedded import asked, vectors
from tests.engine.model.test_base import headless
from tests.engines import Watched
from tests.tiny import CONFIGS, write_checkpoint

LENGTHS = (1, 7, 30, 12)


def both_ways(folder, family, **said):
    write_checkpoint(folder, family)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    return folder


SAID = {
    "llama": {"model_type": "llama_bidirec"},
    "gemma3_text": {"use_bidirectional_attention": True},
}


@pytest.fixture(scope="module", params=SAID)
def checkpoint(request, tmp_path_factory):
    return both_ways(tmp_path_factory.mktemp(request.param), request.param, **SAID[request.param])


@pytest.fixture(scope="module")
def watched(checkpoint):
    return Watched(checkpoint)


def states(folder, prompt):
    """What mlx-lm's blocks give where the masks that they are called with let all see all of their windows."""
    config = json.loads((folder / "config.json").read_text())
    config = {"model_type": "llama" if config["model_type"] == "llama_bidirec" else config["model_type"]}
    model, _ = load_model(folder, model_config=config)
    places = mx.arange(len(prompt))
    window = CONFIGS["gemma3_text"]["sliding_window"] // 2
    near = mx.abs(places[:, None] - places) <= window
    rows = model.model.embed_tokens(mx.array([list(prompt)]))
    pattern = CONFIGS["gemma3_text"]["sliding_window_pattern"]
    is_gemma = config["model_type"] == "gemma3_text"
    if is_gemma:
        rows = rows * mx.array(rows.shape[-1] ** 0.5, mx.bfloat16).astype(rows.dtype)
    for number, layer in enumerate(model.model.layers):
        sees_all = not is_gemma or number % pattern == pattern - 1
        rows = layer(rows, None if sees_all else near, None)
    return np.array(model.model.norm(rows)[0])


def test_states_are_those_of_the_unmasked_model(watched, checkpoint):
    for length in LENGTHS:
        request = asked(watched, str(length), length, "mean", normalizes=False)
        [vector] = vectors(watched, [request])
        expected = states(checkpoint, request.prompt).mean(0)
        assert np.abs(vector - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_text_in_company_is_what_it_is_alone(watched):
    requests = [asked(watched, str(length), length, "mean") for length in LENGTHS]
    alone = [vectors(watched, [request])[0] for request in requests]
    assert all(map(np.array_equal, vectors(watched, requests), alone))


def test_it_differs_from_the_model_that_looks_back(tmp_path):
    plain = Watched(write_checkpoint(tmp_path / "plain"))
    both = Watched(both_ways(tmp_path / "both", "llama", is_causal=False))
    request = asked(plain, "a", 9, "mean")
    assert not np.allclose(vectors(plain, [request]), vectors(both, [request]), atol=1e-3)
    assert both.engine.pooler.embedding.pooling == "mean"
    assert not both.engine.continues


def test_without_an_output_head(tmp_path):
    both = Watched(both_ways(tmp_path / "both", "gemma3_text", use_bidirectional_attention=True))
    request = asked(both, "a", 20, "mean")
    expected = vectors(both, [request])
    assert np.array_equal(vectors(Watched(headless(tmp_path / "both")), [request]), expected)


def test_recurrent_layers_cannot(tmp_path):
    with pytest.raises(UnsupportedModel, match="ArraysCache"):
        load(both_ways(tmp_path / "both", "mamba2", is_causal=False))
