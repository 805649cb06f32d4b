"""Encoders give the states that their papers say, whatever their company, and no tokens."""

import math

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ContextLengthExceeded, EmbeddingsOnly, UnsupportedModel
from engine.request import Embedding
from engine.scheduler import Scheduler
from tests.embedded import asked, vectors
from tests.encoders import CONFIGS, HEADS, LAYERS, SIZE, encoder_weights, write_encoder
from tests.engines import Watched

LENGTHS = (1, 7, 20, 30)


@pytest.fixture(scope="module", params=CONFIGS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def watched(family, tmp_path_factory):
    return Watched(write_encoder(tmp_path_factory.mktemp(family), family))


def normed(rows, weight, bias=0.0, eps=1e-12):
    apart = rows - rows.mean(-1, keepdims=True)
    return apart / np.sqrt((apart**2).mean(-1, keepdims=True) + eps) * weight + bias


def gelu(rows):
    return rows * 0.5 * (1 + np.vectorize(math.erf)(rows / math.sqrt(2)))


def attention(queries, keys, values, seen=True):
    outputs = []
    for head in np.split(np.arange(SIZE), HEADS):
        scores = queries[:, head] @ keys[:, head].T / math.sqrt(len(head))
        scores = np.where(seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(shares / shares.sum(-1, keepdims=True) @ values[:, head])
    return np.concatenate(outputs, axis=-1)


def bert(prompt, config, w):
    first = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0
    eps = config["layer_norm_eps"]

    def linear(rows, name):
        return rows @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(rows, name):
        return normed(rows, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    rows = w["embeddings.word_embeddings.weight"][list(prompt)]
    rows = rows + w["embeddings.position_embeddings.weight"][first : first + len(prompt)]
    rows = norm(rows + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        parts = [linear(rows, f"{layer}.attention.self.{name}") for name in ("query", "key", "value")]
        mixed = linear(attention(*parts), f"{layer}.attention.output.dense")
        rows = norm(rows + mixed, f"{layer}.attention.output.LayerNorm")
        inner = gelu(linear(rows, f"{layer}.intermediate.dense"))
        rows = norm(rows + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return rows


def rotated(rows, theta):
    half = SIZE // HEADS // 2
    angles = np.arange(len(rows))[:, None] * theta ** (-np.arange(half) / half)
    heads = rows.reshape(len(rows), HEADS, 2 * half)
    one, other = heads[..., :half], heads[..., half:]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([one * cos - other * sin, other * cos + one * sin], -1).reshape(rows.shape)


def modernbert(prompt, config, w):
    w = {name.removeprefix("model."): array for name, array in w.items()}
    rows = normed(w["embeddings.tok_embeddings.weight"][list(prompt)], w["embeddings.norm.weight"], eps=1e-5)
    places = np.arange(len(prompt))
    for number in range(LAYERS):
        layer, sees_all = f"layers.{number}", number % 3 == 0
        given = normed(rows, w[f"{layer}.attn_norm.weight"], eps=1e-5) if number else rows
        queries, keys, values = np.split(given @ w[f"{layer}.attn.Wqkv.weight"].T, 3, axis=-1)
        theta = 160000.0 if sees_all else 10000.0
        seen = sees_all | (np.abs(places[:, None] - places) <= config["local_attention"] // 2)
        mixed = attention(rotated(queries, theta), rotated(keys, theta), values, seen)
        rows = rows + mixed @ w[f"{layer}.attn.Wo.weight"].T
        inner, gate = np.split(
            normed(rows, w[f"{layer}.mlp_norm.weight"], eps=1e-5) @ w[f"{layer}.mlp.Wi.weight"].T, 2, axis=-1
        )
        rows = rows + (gelu(inner) * gate) @ w[f"{layer}.mlp.Wo.weight"].T
    return normed(rows, w["final_norm.weight"], eps=1e-5)


def test_states_are_those_of_the_paper(watched, family):
    config = CONFIGS[family]
    w = {name: np.array(array, np.float64) for name, array in encoder_weights(family).items()}
    states_of = modernbert if family == "modernbert" else bert
    for pooling, pooled in {
        "mean": lambda rows: rows.mean(0),
        "cls": lambda rows: rows[0],
        "last": lambda rows: rows[-1],
    }.items():
        requests = [asked(watched, str(length), length, pooling, normalizes=False) for length in LENGTHS]
        for request, vector in zip(requests, vectors(watched, requests), strict=True):
            expected = pooled(states_of(request.prompt, config, w))
            assert np.abs(vector - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_text_in_company_is_what_it_is_alone(watched, pooling):
    requests = [asked(watched, str(length), length, pooling) for length in LENGTHS]
    alone = [vectors(watched, [request])[0] for request in requests]
    assert all(map(np.array_equal, vectors(watched, requests), alone))


def test_texts_run_whole_and_several_in_a_forward(watched):
    rows = [watched.engine.submit(asked(watched, str(n), 20, "mean")) for n in range(5)]
    scheduler = Scheduler(watched.engine.plan(), num_slots=4, memory=watched.engine.memory)
    for row in rows:
        scheduler.add(row)
    sizes = []
    while scheduler.has_work:
        tick = scheduler.tick()
        sizes.append([piece.num_tokens for piece in tick.prefill])
        scheduler.settle(watched.engine.run(tick))
        scheduler.check()
    assert sizes == [[20, 20, 20], [20, 20]]  # no more in one forward than the longest text may have, 64


def test_it_says_what_it_is(watched):
    assert watched.engine.mode == "whole"
    assert "embeddings only: the checkpoint is an encoder" in watched.engine.notes
    assert watched.engine.pooler.embedding == Embedding(SIZE, "mean")
    assert watched.engine.context_length == 64


def test_slots_share_no_context(tmp_path):
    folder = write_encoder(tmp_path / "m")
    assert Watched(folder, parallel=16).engine.context_length == 64
    assert Watched(folder, parallel=16, ctx_size=32).engine.context_length == 32


def test_what_it_cannot_is_refused(watched):
    with pytest.raises(EmbeddingsOnly):
        watched.engine.submit(watched.request("a", 5, 5))
    vectors(watched, [asked(watched, "a", 64, "mean")])
    with pytest.raises(ContextLengthExceeded):
        watched.engine.submit(asked(watched, "a", 65, "mean"))


@pytest.mark.parametrize("prefix", ["bert.", "roberta."])
def test_a_part_of_a_larger_model(tmp_path, prefix):
    plain = Watched(write_encoder(tmp_path / "plain"))
    part = Watched(write_encoder(tmp_path / "part", prefix=prefix))
    request = asked(plain, "a", 9, "mean")
    assert np.array_equal(vectors(plain, [request]), vectors(part, [request]))


@pytest.mark.parametrize(
    ("family", "said", "named"),
    [
        ("bert", {"hidden_act": "mish"}, "mish"),
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("modernbert", {"hidden_activation": "mish"}, "mish"),
        ("modernbert", {"rope_scaling": {"rope_type": "yarn"}}, "rotary"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, family, said, named):
    with pytest.raises(UnsupportedModel, match=named):
        Engine.open(EngineConfig(model=write_encoder(tmp_path / "m", family, **said)))
