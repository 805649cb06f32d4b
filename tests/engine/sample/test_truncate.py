"""The truncations against their definitions, one row and one token at a time in float64."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from engine.request import Sampling
from engine.sample.chain import sample
from engine.sample.state import Draw, noise_key
from engine.sample.truncate import truncated

VOCAB = 64
EXCEPTED = (3, 40)


def logits(rows=1, seed=0, scale=3.0):
    return mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * scale


def draw(sampling, index=0):
    return Draw(sampling, noise_key(5, 0, index), excepted=EXCEPTED)


def softmax(values):
    p = np.exp(values - values.max())
    return p / p.sum()


def kept_by(row, sampling, chance):
    """The ids that the truncations leave, in their order; each sees what is left and its renormalized mass."""
    row = np.array(row, np.float64)
    left = [i for i in np.argsort(-row, kind="stable") if row[i] > -np.inf]
    least = max(sampling.min_keep, 1)

    def at_least(kept, by):
        order = sorted(left, key=by)
        return [i for i in order if i in set(kept) | set(order[:least])]

    def by_logit(i):
        return -row[i]

    if sampling.top_n_sigma > 0:
        bound = row[left].max() - sampling.top_n_sigma * row[left].std()
        left = at_least([i for i in left if row[i] >= bound], by_logit)
    if 0 < sampling.top_k < VOCAB:
        left = at_least(left[: sampling.top_k], by_logit)
    if sampling.typical_p < 1:
        p = dict(zip(left, softmax(row[left]), strict=True))
        entropy = -sum(q * np.log(q) for q in p.values())

        def by_distance(i):
            return abs(-np.log(p[i]) - entropy)

        order = sorted(left, key=by_distance)
        before = np.cumsum([0, *(p[i] for i in order)])
        left = at_least(
            [i for i, mass in zip(order, before[:-1], strict=True) if mass < sampling.typical_p], by_distance
        )
        left.sort(key=by_logit)
    if sampling.top_p < 1:
        before = np.cumsum([0, *softmax(row[left])])[:-1]
        left = at_least([i for i, mass in zip(left, before, strict=True) if mass < sampling.top_p], by_logit)
    if sampling.min_p > 0:
        ratio = softmax(row[left]) / softmax(row[left]).max()
        left = at_least([i for i, r in zip(left, ratio, strict=True) if r >= sampling.min_p], by_logit)
    if chance < sampling.xtc_probability:
        p = softmax(row[left])
        above = [i for i, q in zip(left, p, strict=True) if q >= sampling.xtc_threshold]
        removed = set(above[:-1]) - set(EXCEPTED)
        if len(left) - len(removed) >= sampling.min_keep:
            left = [i for i in left if i not in removed]
    return set(map(int, left))


ALONE = [
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.2},
    {"top_n_sigma": 0.01, "min_keep": 4},
    {"top_k": 7},
    {"top_k": 2, "min_keep": 6},
    {"typical_p": 0.5},
    {"typical_p": 0.95},
    {"typical_p": 0.01},
    {"typical_p": 0.01, "min_keep": 9},
    {"top_p": 0.6},
    {"top_p": 0.0, "min_keep": 3},
    {"min_p": 0.2},
    {"min_p": 0.9, "min_keep": 5},
    {"min_keep": 1000},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 8, "min_keep": 8},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
]
TOGETHER = [
    {"top_n_sigma": 2.0, "top_k": 30, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.02, "xtc_probability": 0.5},
    {"top_n_sigma": 1.5, "typical_p": 0.8, "min_p": 0.1},
    {"top_k": 12, "typical_p": 0.7, "top_p": 0.8, "xtc_probability": 1.0, "xtc_threshold": 0.02, "min_keep": 2},
    {"top_k": 25, "top_p": 0.7, "min_p": 0.05, "min_keep": 3},
]


@pytest.mark.parametrize("options", [*ALONE, *TOGETHER], ids=str)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_what_is_kept_is_what_the_definitions_keep(options, scale):
    for seed in range(6):
        row = logits(seed=seed, scale=scale)
        one = draw(Sampling(temperature=1.0, **options), seed)
        seen = np.array(truncated(row, [one]))[0]
        expected = kept_by(row[0], one.sampling, one.chance)
        assert set(np.flatnonzero(seen > -np.inf).tolist()) == expected
        assert np.array_equal(seen[sorted(expected)], np.array(row)[0][sorted(expected)]), "a kept logit moved"


@pytest.mark.parametrize("options", [*ALONE, *TOGETHER], ids=str)
def test_what_is_masked_before_is_never_drawn_and_counts_for_nothing(options):
    row = np.array(logits(seed=3))[0]
    row[::2] = -np.inf
    one = draw(Sampling(temperature=1.0, **options), 2)
    seen = np.array(truncated(mx.array(row[None]), [one]))[0]
    assert set(np.flatnonzero(seen > -np.inf).tolist()) == kept_by(row, one.sampling, one.chance)
    lone = np.full(VOCAB, -np.inf, np.float32)
    lone[11] = -4.0
    assert sample(mx.array(lone[None]), [one]).item() == 11


def test_no_row_sees_its_company():
    samplings = [Sampling(temperature=1.0, **options) for options in (*ALONE, *TOGETHER, {})]
    rows = logits(len(samplings), seed=9)
    draws = [draw(sampling, i) for i, sampling in enumerate(samplings)]
    alone = [np.array(truncated(rows[i : i + 1], [one]))[0] for i, one in enumerate(draws)]
    assert np.array_equal(np.array(truncated(rows, draws)), np.array(alone))
    assert np.array_equal(np.array(truncated(rows[::-1], draws[::-1])), np.array(alone)[::-1])


def test_ties_stay_together():
    flat = mx.zeros((1, VOCAB))
    for options in ALONE:
        seen = np.array(truncated(flat, [draw(Sampling(temperature=1.0, **options))]))[0]
        assert (seen > -np.inf).all(), options


def test_what_nobody_asks_for_is_not_run():
    row = logits(2)
    assert truncated(row, [draw(Sampling(temperature=1.0))] * 2) is row


def test_xtc_tosses_for_each_draw_and_apart_from_its_noise():
    draws = [draw(Sampling(temperature=1.0), i) for i in range(4000)]
    chances = np.array([one.chance for one in draws])
    assert abs(chances.mean() - 0.5) < 5 * np.sqrt(1 / 12 / len(draws))
    assert len(set(chances)) == len(draws)
    tokens = np.array(sample(mx.zeros((len(draws), 2)), draws))
    assert abs(np.corrcoef(chances, tokens)[0, 1]) < 5 / np.sqrt(len(draws))


def test_every_pair_of_truncations_leaves_something():
    row = logits(seed=4)
    for one, other in itertools.combinations(ALONE, 2):
        sampling = Sampling(temperature=1.0, **(one | other))
        assert (np.array(truncated(row, [draw(sampling)])) > -np.inf).any()
