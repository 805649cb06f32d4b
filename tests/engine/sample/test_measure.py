"""Logprobs of draws: the model's own, whatever the sampler does, and whoever else is in the step."""

import mlx.core as mx
import numpy as np

from engine.request import NO_LOGPROB, Sampling
from engine.sample.chain import sample
from engine.sample.measure import MAX_TOP, measure
from engine.sample.state import Draw, noise_key

VOCAB = 300


def logits(rows=1, seed=0):
    return mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * 3


def draw(index=0, **sampling):
    return Draw(Sampling(**sampling), noise_key(2, 0, index))


def log_softmax(row):
    row = np.array(row, np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def told(rows, draws, wanted):
    tokens = sample(rows, draws)
    return measure(rows, tokens, draws, wanted).read(tokens.tolist())


def test_they_are_of_the_logits_as_the_model_gave_them():
    row = logits()
    expected = log_softmax(row[0])
    order = np.argsort(-expected)
    for options in (
        {},
        {"temperature": 3.0, "top_k": 5},
        {"logit_bias": ((7, 100.0),)},
        {"temperature": 1.0, "mirostat": 2},
    ):
        [measured] = told(row, [draw(**options)], [4])
        logprob = measured.logprob
        assert np.isclose(logprob.logprob, expected[logprob.token], atol=1e-5)
        assert [token for token, _ in logprob.top] == order[:4].tolist()
        assert np.allclose([value for _, value in logprob.top], expected[order[:4]], atol=1e-5)
        if "logit_bias" in options:
            assert logprob.token == 7


def test_as_many_are_told_as_each_row_asks_for_and_none_sees_its_company():
    wanted = [None, 0, 1, MAX_TOP, 5, None, 2]
    rows = logits(len(wanted), seed=4)
    draws = [draw(i, temperature=float(i % 2), mirostat=i % 3) for i in range(len(wanted))]
    together = told(rows, draws, wanted)
    assert together == [told(rows[i : i + 1], [one], wanted[i : i + 1])[0] for i, one in enumerate(draws)]
    assert [None if m.logprob is None else len(m.logprob.top) for m in together] == wanted
    assert [m.surprise is not None for m in together] == [bool(i % 3 and i % 2) for i in range(len(wanted))]


def test_ties_go_by_token_and_do_not_depend_on_how_many_are_asked_for():
    flat = mx.zeros((3, VOCAB))
    measured = told(flat, [draw()] * 3, [3, MAX_TOP, 0])
    assert measured[0].logprob.top == measured[1].logprob.top[:3]
    assert [token for token, _ in measured[1].logprob.top] == sorted(token for token, _ in measured[1].logprob.top)


def test_what_has_no_probability_has_a_number_all_the_same():
    row = np.full(VOCAB, -np.inf, np.float32)
    row[5] = 1.0
    one = draw(logit_bias=((5, -100.0),))
    [measured] = told(mx.array(row[None]), [one], [2])
    assert measured.logprob.top[0] == (5, 0.0)
    assert measured.logprob.top[1][1] == NO_LOGPROB


def test_what_nobody_asks_for_is_not_computed():
    measures = measure(logits(2), mx.array([1, 2]), [draw(), draw(temperature=1.0)], [None, None])
    assert measures.arrays == []
    assert [(m.logprob, m.surprise) for m in measures.read([1, 2])] == [(None, None)] * 2


def test_a_vocabulary_smaller_than_what_is_asked_for_is_told_whole():
    [measured] = told(mx.array([[0.0, 1.0, 2.0]]), [draw()], [MAX_TOP])
    assert [token for token, _ in measured.logprob.top] == [2, 1, 0]


def test_half_precision_logits_are_measured_in_float32():
    rows = logits().astype(mx.bfloat16)
    assert told(rows, [draw()], [3]) == told(rows.astype(mx.float32), [draw()], [3])
