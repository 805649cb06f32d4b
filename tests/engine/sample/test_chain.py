"""The sampler step against an independent NumPy reference, and its independence of company."""

import math

import mlx.core as mx
import numpy as np
import pytest

from engine.request import Request, Row, Sampling
from engine.sample.chain import sample
from engine.sample.penalties import biased, penalized
from engine.sample.state import Draw, draw_of, noise_key

VOCAB = 64


def logits(rows=1, seed=0, vocab=VOCAB):
    return mx.random.normal((rows, vocab), key=mx.random.key(seed)) * 3


def draw(index=0, seed=1, choice=0, **sampling):
    return Draw(Sampling(seed=seed, **sampling), noise_key(seed, choice, index))


def allowed(row, sampling):
    """The ids that the truncations leave, by sorting in float64."""
    row = np.array(row, np.float64)
    order = np.argsort(-row)
    kept = order[: sampling.top_k] if sampling.top_k else order
    mass = np.exp(row[kept] - row.max())
    mass /= mass.sum()
    before = np.cumsum(mass) - mass
    kept = kept[before < sampling.top_p] if sampling.top_p < 1 else kept
    kept = kept if len(kept) else order[:1]
    ratio = np.exp(row[kept] - row.max())
    return set(kept[ratio >= sampling.min_p].tolist())


SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.0, top_k=1000),
    Sampling(temperature=1.0, top_p=0.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_come_from_the_truncated_distribution(sampling):
    """Frequencies over many draws match the softmax of what truncation leaves, within five deviations."""
    row, count = logits(), 3000
    many = mx.broadcast_to(row, (count, VOCAB))
    draws = [Draw(sampling, noise_key(3, 0, i)) for i in range(count)]
    seen = np.bincount(np.array(sample(many, draws)), minlength=VOCAB) / count
    kept = allowed(row[0], sampling)
    assert set(np.flatnonzero(seen).tolist()) <= kept
    scaled = np.array(row[0], np.float64) / sampling.temperature
    expected = np.where([i in kept for i in range(VOCAB)], np.exp(scaled - scaled.max()), 0)
    expected /= expected.sum()
    assert (np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9).all()


def test_greedy_is_the_argmax_and_needs_no_noise():
    rows = logits(3)
    assert sample(rows, [draw(temperature=0.0)] * 3).tolist() == mx.argmax(rows, axis=-1).tolist()
    assert sample(rows, [draw(temperature=1e-9)] * 3).tolist() == mx.argmax(rows, axis=-1).tolist()


def test_a_row_draws_alike_alone_and_in_any_company():
    rows = logits(len(SAMPLINGS) + 2, seed=5)
    samplings = [*SAMPLINGS, Sampling(), Sampling(temperature=1.0, top_k=3)]
    draws = [Draw(sampling, noise_key(9, 0, i)) for i, sampling in enumerate(samplings)]
    together = sample(rows, draws).tolist()
    assert together == [sample(rows[i : i + 1], [one]).item() for i, one in enumerate(draws)]
    backwards = sample(rows[::-1], draws[::-1]).tolist()
    assert together == backwards[::-1]


def test_ties_at_the_edge_of_a_truncation_do_not_depend_on_company():
    flat = mx.zeros((1, VOCAB))
    one = draw(temperature=1.0, top_k=3, index=4)
    alone = sample(flat, [one]).item()
    for other in SAMPLINGS:
        pair = mx.concatenate([flat, logits()])
        assert sample(pair, [one, Draw(other, (1, 2))])[0].item() == alone


def test_seed_choice_and_index_all_move_the_draw():
    keys = {noise_key(seed, choice, index) for seed in range(8) for choice in range(8) for index in range(8)}
    assert len(keys) == 512
    assert noise_key(2**64 + 5, 0, 0) == noise_key(5, 0, 0)
    assert noise_key(-1, 0, 0) == noise_key(2**64 - 1, 0, 0)


def test_half_precision_logits_are_drawn_in_float32():
    rows = logits(2).astype(mx.bfloat16)
    draws = [draw(temperature=1.0, top_p=0.9), draw(temperature=0.0)]
    assert sample(rows, draws).tolist() == sample(rows.astype(mx.float32), draws).tolist()


def test_noise_is_gumbel():
    count = 4000
    uniform = mx.broadcast_to(mx.zeros((1, 2)), (count, 2))
    first = np.array(sample(uniform, [draw(i, temperature=1.0) for i in range(count)]))
    assert abs(first.mean() - 0.5) < 5 * math.sqrt(0.25 / count)


def reference(row, sampling, tokens):
    """Bias and penalties by their definitions, one token at a time, in float64."""
    row = np.array(row, np.float64)
    for token, added in sampling.logit_bias:
        row[token] += added
    window = (
        tokens if sampling.repeat_last_n < 0 else tokens[len(tokens) - min(sampling.repeat_last_n, len(tokens)) :]
    )
    for token in set(window):
        factor = sampling.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= window.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    return row


PENALTIES = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"repetition_penalty": 1.3, "frequency_penalty": -0.2, "presence_penalty": 1.0, "repeat_last_n": 5},
    {"repetition_penalty": 1.3, "repeat_last_n": -1},
    {"repetition_penalty": 5.0, "repeat_last_n": 0},
    {"logit_bias": ((3, 4.0), (9, -100.0), (60, 0.5))},
    {"logit_bias": ((7, 2.0),), "repetition_penalty": 1.5, "presence_penalty": 0.5},
]


def looking_back(prompt, output, **sampling):
    request = Request("r", tuple(prompt), Sampling(**sampling))
    return draw_of(Row(request, 100, 1, None, output=list(output)))


@pytest.mark.parametrize("options", PENALTIES, ids=str)
@pytest.mark.parametrize("output", [[], [3, 3, 9, 60], [7] * 70])
def test_bias_and_penalties_are_their_definitions(options, output):
    prompt = [5, 3, 9, 9, 7, 41]
    row = logits(seed=8)
    expected = reference(row[0], Sampling(**options), prompt + output)
    one = looking_back(prompt, output, **options)
    changed = np.array(penalized(biased(row, [one]), [one]))[0]
    assert np.allclose(changed, expected, rtol=1e-6, atol=1e-6)
    assert sample(row, [one]).item() == int(np.argmax(expected))


def test_penalties_touch_their_own_rows_only():
    rows = logits(len(PENALTIES) + 1, seed=6)
    draws = [looking_back([1, 2, 3], [3, 5] * i, **options) for i, options in enumerate(PENALTIES)]
    draws.append(draw(temperature=1.0, top_k=10))
    together = sample(rows, draws).tolist()
    assert together == [sample(rows[i : i + 1], [one]).item() for i, one in enumerate(draws)]
    plain = np.array(penalized(biased(rows, draws), draws))[-1]
    assert np.array_equal(plain, np.array(rows)[-1])


def test_a_window_spans_prompt_and_output():
    assert looking_back([1, 2, 3], [4], repetition_penalty=2.0, repeat_last_n=3).recent == {2: 1, 3: 1, 4: 1}
    assert looking_back([1, 2], [3, 3, 4], repetition_penalty=2.0, repeat_last_n=2).recent == {3: 1, 4: 1}
    assert looking_back([1], [2], repeat_last_n=2).recent == {}
