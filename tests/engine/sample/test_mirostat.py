"""Mirostat and the dynamic temperature against their definitions in float64."""

import math

import mlx.core as mx
import numpy as np
import pytest

from engine.request import Sampling
from engine.sample.chain import GREEDY_BELOW, _temperature, sample, surprises
from engine.sample.mirostat import NUM_CANDIDATES, bounded
from engine.sample.state import Draw, SamplerState, noise_key

VOCAB = 400


def logits(rows=1, seed=0, scale=2.0):
    return mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * scale


def draw(index=0, mu=10.0, **options):
    return Draw(Sampling(temperature=1.0, **options), noise_key(3, 0, index), mu=mu)


def bits(row):
    row = np.array(row, np.float64)
    return -(row - row.max() - np.log(np.exp(row - row.max()).sum())) / math.log(2)


def first(row, mu):
    """How many tokens version 1 keeps, by the paper's formulas."""
    p = np.sort(np.exp2(-bits(row)))[::-1]
    t = [math.log((i + 2) / (i + 1)) for i in range(NUM_CANDIDATES - 1)]
    b = [math.log(p[i] / p[i + 1]) for i in range(NUM_CANDIDATES - 1)]
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    excess = s - 1
    return max(int((excess * 2**mu / (1 - len(p) ** -excess)) ** (1 / s)), 1)


@pytest.mark.parametrize("mu", [-3.0, 0.5, 3.0, 5.0, 9.0, 40.0])
def test_version_2_keeps_what_is_no_more_surprising_than_mu(mu):
    for seed in range(5):
        row = logits(seed=seed)
        kept = np.array(bounded(row, [draw(mu=mu, mirostat=2)]))[0] > -np.inf
        expected = bits(row[0]) <= mu
        expected[np.argmax(np.array(row)[0])] = True
        assert np.array_equal(kept, expected)


@pytest.mark.parametrize("mu", [-3.0, 0.5, 3.0, 5.0, 7.0, 60.0])
@pytest.mark.parametrize("scale", [1.0, 2.0, 6.0])
def test_version_1_keeps_as_many_as_zipfs_law_says(mu, scale):
    for seed in range(5):
        row = logits(seed=seed, scale=scale)
        count = int((np.array(bounded(row, [draw(mu=mu, mirostat=1)]))[0] > -np.inf).sum())
        assert abs(count - min(first(row[0], mu), VOCAB)) <= 1  # where float32 rounds to the other side


@pytest.mark.parametrize("version", [1, 2])
def test_flat_peaked_and_masked_rows_keep_what_is_likeliest(version):
    peaked, masked = np.zeros(VOCAB, np.float32), np.full(VOCAB, -np.inf, np.float32)
    peaked[7], masked[9], masked[10] = 50.0, 1.0, 0.5
    rows = mx.array(np.stack([np.zeros(VOCAB, np.float32), peaked, masked]))
    kept = np.array(bounded(rows, [draw(mirostat=version, mu=1.0)] * 3)) > -np.inf
    assert kept[0].any()
    assert kept[1, 7]
    assert kept[2, 9]
    assert not kept[2, :9].any()


@pytest.mark.parametrize(("version", "tau", "scale"), [(1, 3.0, 3.0), (2, 3.0, 3.0), (2, 5.0, 1.5)])
def test_the_surprise_of_what_is_drawn_averages_the_target(version, tau, scale):
    sampling = Sampling(temperature=1.0, mirostat=version, mirostat_tau=tau, mirostat_eta=0.1)
    state = SamplerState.of(sampling)
    assert state.mu == 2 * tau
    seen = []
    for index in range(1200):
        row = logits(seed=index % 40, scale=scale)
        one = Draw(sampling, noise_key(1, 0, index), mu=state.mu)
        token = sample(row, [one])
        seen.append(surprises(row, token, [one]).item())
        assert math.isclose(seen[-1], bits(row[0])[token.item()], rel_tol=1e-4, abs_tol=1e-4)
        state.observe(sampling, seen[-1])
    assert abs(np.mean(seen[200:]) - tau) < 0.1


def test_what_could_not_have_been_drawn_steers_nothing():
    sampling = Sampling(mirostat=2)
    state = SamplerState.of(sampling)
    for surprise in (math.inf, math.nan):
        state.observe(sampling, surprise)
    assert state.mu == 2 * sampling.mirostat_tau


def test_mirostat_takes_the_place_of_truncations_and_of_nothing_else():
    row = logits(seed=2)
    plain, narrow = (
        draw(mirostat=2),
        draw(mirostat=2, top_k=1, min_p=0.9, top_p=0.1, typical_p=0.1, top_n_sigma=0.1),
    )
    assert sample(row, [plain]).item() == sample(row, [narrow]).item()
    biased = draw(mirostat=2, logit_bias=((5, 100.0),))
    assert sample(row, [biased]).item() == 5
    assert surprises(row, mx.array([5]), [biased]).item() < 1e-3
    greedy = Draw(Sampling(temperature=0.0, mirostat=2), (1, 2), mu=10.0)
    assert sample(row, [greedy]).item() == int(np.argmax(np.array(row)[0]))


def test_rows_steered_differently_share_a_step():
    draws = [draw(i, mu=float(i), mirostat=i % 3, top_k=i + 2, dynatemp_range=0.3 * (i % 2)) for i in range(8)]
    rows = logits(len(draws), seed=6)
    together = sample(rows, draws)
    assert together.tolist() == [sample(rows[i : i + 1], [one]).item() for i, one in enumerate(draws)]
    alone = [surprises(rows[i : i + 1], together[i : i + 1], [one]).item() for i, one in enumerate(draws)]
    assert surprises(rows, together, draws).tolist() == alone


@pytest.mark.parametrize("options", [(1.0, 0.5, 1.0), (0.8, 2.0, 2.0), (1.5, 0.2, 0.5), (0.7, 0.0, 1.0)], ids=str)
def test_a_dynamic_temperature_follows_the_entropy(options):
    temperature, spread, exponent = options
    rows = np.array(logits(3, seed=7))
    rows[1, 20:] = -np.inf
    rows[2, 1:] = -np.inf
    sampling = Sampling(temperature=temperature, dynatemp_range=spread, dynatemp_exponent=exponent)
    seen = np.array(_temperature(mx.array(rows), [Draw(sampling, (1, 2))] * 3))[:, 0]
    for row, value in zip(rows, seen, strict=True):
        p = np.exp2(-bits(row[row > -np.inf]))
        share = -(p * np.log(p)).sum() / math.log(len(p)) if len(p) > 1 else 0.0
        low, high = max(temperature - spread, 0), temperature + spread
        expected = max(low + (high - low) * share**exponent, GREEDY_BELOW) if spread else temperature
        assert math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-5)
