"""`attend` against float64, and each query's bits whatever else is in the call and however it was stored."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import native


class Row:
    """A made-up row's queries, keys and values, and storage that a call goes on with."""

    def __init__(self, rng, length, heads, key_heads, key_dim, value_dim, capacity=None, base=0):
        shapes = (heads, key_dim), (key_heads, key_dim), (key_heads, value_dim)
        self.queries, self.keys, self.values = (
            rng.standard_normal((length, count, 1, dim)).astype(np.float32) for count, dim in shapes
        )
        self.capacity = capacity or length + 3
        self.base = base
        self.empty()

    def empty(self):
        """Storage that holds what no query may see."""
        self.length = 0
        self.storage = [
            mx.full((1, array.shape[1], self.capacity, array.shape[3]), 1e30) for array in (self.keys, self.values)
        ]

    def piece(self, count):
        return slice(self.length, self.length + count)


def attend(rows, counts, scale=0.3, window=0, sinks=None):
    """The next `counts[i]` tokens of each row in one call: their outputs, row by row."""
    arrays = [
        mx.array(
            np.concatenate([getattr(row, name)[row.piece(count)] for row, count in zip(rows, counts, strict=True)])
        )
        for name in ("queries", "keys", "values")
    ]
    places, start = [], 0
    for row, count in zip(rows, counts, strict=True):
        places.append((start, count, row.length, row.base))
        start += count
    storage = [array for row in rows for array in row.storage]
    output, *written = native.attend(arrays[0], (arrays[1], arrays[2]), storage, places, scale, window, sinks)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        row.storage = written[2 * i : 2 * i + 2]
        row.length += count
    edges = np.cumsum([0, *counts])
    output = np.array(output)
    return [output[a:b] for a, b in itertools.pairwise(edges)]


def expected(row, scale=0.3, window=0, sinks=None):
    group = row.queries.shape[1] // row.keys.shape[1]
    length = len(row.queries)
    q, k, v = (array[:, :, 0].astype(np.float64) for array in (row.queries, row.keys, row.values))
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) * scale
    seen = np.tril(np.ones((length, length), bool))
    if window:
        seen &= ~np.tril(seen, -window)
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(np.array(sinks, np.float64)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", weights[..., :length], np.repeat(v, group, axis=1))
    return out[:, :, None]


def assert_close(output, wanted):
    assert np.abs(output - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.mark.parametrize("key_dim", [8, 32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("window", [0, 1, 7, 100])
def test_against_float64(level, rng, key_dim, window):
    sinks = mx.array(rng.standard_normal(6).astype(np.float32)) if window == 7 else None
    row = Row(rng, 130, 6, 2, key_dim, key_dim + (13 if window == 100 else 0))
    [output] = attend([row], [130], window=window, sinks=sinks)
    assert_close(output, expected(row, window=window, sinks=sinks))


@pytest.mark.parametrize("window", [0, 9])
def test_any_cut_is_the_whole(level, rng, window):
    row = Row(rng, 140, 6, 2, 64, 64)
    [whole] = attend([row], [140], window=window)
    for cut in ([1] * 140, [7] * 20, [31, 32, 33, 44], [139, 1]):
        row.empty()
        assert np.array_equal(np.concatenate([attend([row], [count], window=window)[0] for count in cut]), whole)


def test_rows_of_any_length_together_are_each_alone(level, rng):
    rows = [Row(rng, length, 9, 3, 64, 64) for length in (1, 5, 33, 70, 64, 2, 100, 40)]
    alone = [attend([row], [len(row.queries)])[0] for row in rows]
    for row in rows:
        row.empty()
    firsts = attend(rows, [len(row.queries) - 1 for row in rows])
    lasts = attend(rows, [1] * len(rows))
    for whole, first, last in zip(alone, firsts, lasts, strict=True):
        assert np.array_equal(np.concatenate([first, last]), whole)


def test_where_storage_begins_leaves_no_trace(level, rng):
    row = Row(rng, 90, 4, 2, 64, 64)
    outputs = [attend([row], [count], window=10)[0] for count in (75, 15)]
    moved = Row(rng, 90, 4, 2, 64, 64, base=66)
    moved.queries, moved.keys, moved.values, moved.length = row.queries, row.keys, row.values, 75
    kept = [np.array(array)[:, :, 66:75] for array in row.storage]
    moved.storage = [
        mx.array(np.concatenate([array, np.zeros((1, 2, 20, 64), np.float32)], axis=2)) for array in kept
    ]
    assert np.array_equal(attend([moved], [15], window=10)[0], outputs[1])


def test_any_number_of_threads_gives_the_same_bits(compiled, rng):
    row, outputs = Row(rng, 400, 9, 3, 64, 64), []
    for num_threads in (1, 2, 3):
        compiled.set_num_threads(num_threads)
        row.empty()
        outputs.append(attend([row], [400])[0])
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])


def test_what_is_stored_is_attended_to_without_new_keys(level, rng):
    row = Row(rng, 50, 4, 2, 32, 32)
    [output] = attend([row], [50])
    again = native.attend(mx.array(row.queries[-1:]), None, row.storage, [(0, 1, 49, 0)], 0.3)
    assert len(again) == 1
    assert np.array_equal(np.array(again[0]), output[-1:])


def test_arrays_that_do_not_lie_densely(level, rng):
    row = Row(rng, 20, 4, 2, 32, 32)
    [output] = attend([row], [20])
    row.empty()
    turned = [mx.array(np.ascontiguousarray(array.T)).T for array in (row.queries, row.keys, row.values)]
    again = native.attend(turned[0], (turned[1], turned[2]), row.storage, [(0, 20, 0, 0)], 0.3)
    assert np.array_equal(np.array(again[0]), output)


@pytest.mark.parametrize("place", [(0, 3, 0, 0), (1, 2, 0, 0), (0, 2, 7, 0), (0, 2, 0, 1), (-1, 2, 0, 0)])
def test_a_span_outside_of_its_storage_is_refused(compiled, place):
    tokens, storage = mx.zeros((2, 2, 1, 32)), [mx.zeros((1, 2, 8, 32))] * 2
    with pytest.raises(ValueError, match="outside of its tokens or storage"):
        native.attend(tokens, (tokens, tokens), storage, [place], 1.0)


@pytest.mark.parametrize("shape", [(2, 2, 8, 32), (1, 2, 8, 16), (1, 1, 8, 32)])
def test_storage_that_does_not_fit_is_refused(compiled, shape):
    tokens = mx.zeros((2, 2, 1, 32))
    with pytest.raises(ValueError, match=r"do not fit the storage|storages are unlike"):
        native.attend(tokens, (tokens, tokens), [mx.zeros(shape)] * 2, [(0, 2, 0, 0)], 1.0)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    key_dim=st.integers(1, 140),
    value_dim=st.integers(1, 140),
    window=st.integers(0, 50),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=4),
)
def test_any_shape(seed, key_heads, group, key_dim, value_dim, window, cuts):
    if isinstance(native.start(2), str):
        pytest.skip("kernels: portable")
    rng = np.random.default_rng(seed)
    row = Row(rng, sum(cuts), key_heads * group, key_heads, key_dim, value_dim)
    pieces = np.concatenate([attend([row], [count], window=window)[0] for count in cuts])
    row.empty()
    [whole] = attend([row], [sum(cuts)], window=window)
    assert np.array_equal(pieces, whole)
    assert_close(whole, expected(row, window=window))
