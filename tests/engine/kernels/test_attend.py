"""`attend` against float64, and each query's bits whatever else is in the call and however it was stored."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import native
from tests.threads import aside

PAGE = 16
TYPES = (mx.float32, mx.float16, mx.bfloat16)


class Row:
    """A made-up row's queries, keys and values, and storage that a call goes on with.

    All numbers are such as every type can store, so that one reference is right for all.
    """

    def __init__(self, rng, length, heads, key_heads, key_dim, value_dim, capacity=None, base=0, dtype=mx.float32):
        shapes = (heads, key_dim), (key_heads, key_dim), (key_heads, value_dim)
        self.queries, self.keys, self.values = (
            np.array(mx.array(rng.standard_normal((length, count, 1, dim))).astype(mx.bfloat16).astype(mx.float32))
            for count, dim in shapes
        )
        self.capacity = capacity or length + 3
        self.base = base
        self.dtype = dtype
        self.empty()

    def empty(self):
        """Storage that holds what no query may see."""
        self.length = 0
        self.storage = [
            mx.full((1, array.shape[1], self.capacity, array.shape[3]), np.nan, self.dtype)
            for array in (self.keys, self.values)
        ]

    def piece(self, count):
        return slice(self.length, self.length + count)


class Call:
    """Arrays and places of one call: the next `counts[i]` tokens of each row."""

    def __init__(self, rows, counts):
        self.rows, self.counts = rows, counts
        self.queries, *self.new = (
            mx.array(
                np.concatenate(
                    [getattr(row, name)[row.piece(count)] for row, count in zip(rows, counts, strict=True)]
                )
            )
            for name in ("queries", "keys", "values")
        )
        starts = itertools.accumulate(counts, initial=0)
        self.places = [
            (start, count, row.length, row.base) for row, count, start in zip(rows, counts, starts, strict=False)
        ]

    def outputs(self, output):
        """What is each row's, which then has come further."""
        for row, count in zip(self.rows, self.counts, strict=True):
            row.length += count
        output = np.array(output)
        return [output[a:b] for a, b in itertools.pairwise(np.cumsum([0, *self.counts]))]


def attend(rows, counts, scale=0.3, window=0, sinks=None, softcap=0.0):
    """The next `counts[i]` tokens of each row in one call: their outputs, row by row."""
    call = Call(rows, counts)
    storage = [array for row in rows for array in row.storage]
    output, *written = native.attend(
        call.queries, tuple(call.new), storage, call.places, scale, window, sinks, softcap
    )
    for i, row in enumerate(rows):
        row.storage = written[2 * i : 2 * i + 2]
    return call.outputs(output)


class Pool:
    """Blocks that rows share, handed out in any order."""

    def __init__(self, rng, rows):
        num_blocks = [-(-len(row.queries) // PAGE) for row in rows]
        order = rng.permutation(sum(num_blocks) + 5)
        edges = np.cumsum([0, *num_blocks])
        self.tables = [mx.array(order[a:b].astype(np.int32)) for a, b in itertools.pairwise(edges)]
        self.arrays = tuple(
            mx.full((1, array.shape[1], len(order) * PAGE, array.shape[3]), np.nan, rows[0].dtype)
            for array in (rows[0].keys, rows[0].values)
        )

    def attend(self, rows, counts, scale=0.3, window=0, sinks=None, softcap=0.0):
        """As the function of that name, with the rows' keys and values in these blocks."""
        call = Call(rows, counts)
        output, *written = native.attend_paged(
            call.queries, tuple(call.new), self.arrays, self.tables, call.places, scale, window, sinks, softcap
        )
        self.arrays = tuple(written)
        return call.outputs(output)


def expected(row, scale=0.3, window=0, sinks=None, softcap=0.0):
    group = row.queries.shape[1] // row.keys.shape[1]
    length = len(row.queries)
    q, k, v = (array[:, :, 0].astype(np.float64) for array in (row.queries, row.keys, row.values))
    by_head = [array.transpose(1, 0, 2) for array in (q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1))]
    scores = by_head[0] @ by_head[1].swapaxes(1, 2) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    seen = np.tril(np.ones((length, length), bool))
    if window:
        seen &= ~np.tril(seen, -window)
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(np.array(sinks, np.float64)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights[..., :length] @ by_head[2]).transpose(1, 0, 2)[:, :, None]


def assert_close(output, wanted):
    assert np.abs(output - wanted).max() <= 1e-5 * np.abs(wanted).max()


def sinks_of(rng, heads):
    return mx.array(rng.standard_normal(heads).astype(np.float32))


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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "options"),
    [
        (6, 2, 64, {}),
        (3, 3, 128, {"window": 530}),
        (4, 1, 256, {"softcap": 2.0}),
        (5, 1, 72, {"window": 700, "sinks": True}),
    ],
)
def test_parts_of_a_long_context(level, rng, dtype, heads, key_heads, dim, options):
    options = {"scale": dim**-0.5, **options}
    if "sinks" in options:
        options["sinks"] = sinks_of(rng, heads)
    row = Row(rng, 1040, heads, key_heads, dim, dim, dtype=dtype)
    [whole] = attend([row], [1040], **options)
    assert_close(whole, expected(row, **options))
    for cut in ([511, 1, 1, 1, 510, 16], [800, *[20] * 11, *[1] * 20]):
        row.empty()
        assert np.array_equal(np.concatenate([attend([row], [count], **options)[0] for count in cut]), whole)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 24, 32, 64, 80, 128, 200, 256, 512])
def test_types_of_storage(level, rng, dtype, dim):
    row = Row(rng, 90, 4, 2, dim, dim, dtype=dtype)
    pieces = np.concatenate([attend([row], [count])[0] for count in (50, 1, 1, 3, 35)])
    assert_close(pieces, expected(row))
    row.empty()
    assert np.array_equal(attend([row], [90])[0], pieces)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_what_is_stored_is_rounded_to_nearest_even(level, rng, dtype):
    row = Row(rng, 2048, 1, 1, 33, 33, dtype=dtype)
    most = {mx.float16: 65504.0, mx.bfloat16: 3.3895313892515355e38}[dtype]
    exponents = rng.integers(-30 if dtype == mx.float16 else -120, 16, row.keys.shape)
    row.keys = (rng.standard_normal(row.keys.shape) * 2.0**exponents).astype(np.float32).clip(-most, most)
    # Halfway between two that the type has, and at the edges of what it can say.
    steps = np.arange(row.values.size).reshape(row.values.shape)
    row.values = (1 + steps % 4096 / 2 ** (11 if dtype == mx.float16 else 8)).astype(np.float32)
    row.values[:9, 0, 0, 0] = [65519, 65520, 1e30, -np.inf, np.inf, 3.4e38, 0, -0.0, np.nan]
    attend([row], [2048])
    mx.eval(row.storage)
    for stored, said in zip(row.storage, (row.keys, row.values), strict=True):
        kept = np.clip(said, -most, most).transpose(2, 1, 0, 3)
        wanted = mx.array(kept).astype(dtype)
        if dtype == mx.float16:
            wanted = mx.array(kept.astype(np.float16))
        got, wanted = (np.array(array.view(mx.uint16)) for array in (stored[:, :, :2048], wanted))
        differ = (got != wanted) & ~np.isnan(kept)
        assert not differ.any()
    assert np.isnan(np.array(row.storage[1].astype(mx.float32))[0, 0, 8, 0])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("dim", "options"),
    [(64, {}), (40, {"window": 20}), (128, {"window": 600, "sinks": True}), (256, {"softcap": 3.0})],
)
def test_pages_are_as_dense_storage(level, rng, dtype, dim, options):
    options = {"scale": dim**-0.5, **options}
    if "sinks" in options:
        options["sinks"] = sinks_of(rng, 6)
    rows = [Row(rng, length, 6, 2, dim, dim, dtype=dtype) for length in (1, 640, 33, 70, 1100)]
    pool = Pool(rng, rows)
    lengths = [len(row.queries) for row in rows]
    calls = [
        [0, 500, 20, 69, 1040],
        [0, 1, 12, 0, 40],
        [1, 130, 1, 1, 19],
        [0, 9, 0, 0, 1],
    ]
    assert np.array_equal(np.sum(calls, axis=0), lengths)
    dense = [attend(rows, counts, **options) for counts in calls]
    for row in rows:
        row.empty()
    for counts, outputs in zip(calls, dense, strict=True):
        for paged, wanted in zip(pool.attend(rows, counts, **options), outputs, strict=True):
            assert np.array_equal(paged, wanted)


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
@aside
def test_a_table_that_leaves_the_pool_is_an_error_and_writes_nothing(compiled, bad):
    tokens = mx.ones((20, 2, 1, 32))
    pools = tuple(mx.zeros((1, 2, 4 * PAGE, 32)) for _ in range(2))
    tables = [mx.array([0], mx.int32), mx.array([1, bad], mx.int32)]
    mx.eval(pools)
    outputs = native.attend_paged(tokens, (tokens, tokens), pools, tables, [(0, 2, 0, 0), (2, 18, 0, 0)], 1.0)
    with pytest.raises(RuntimeError, match="a block that the pool does not have"):
        mx.eval(outputs)
    assert not any(pool.any() for pool in pools)
    # Of a block that no token reaches nothing is asked.
    again = native.attend_paged(tokens, (tokens, tokens), pools, tables, [(0, 2, 0, 0), (2, 16, 0, 0)], 1.0)
    mx.eval(again)


def test_tables_and_pools_that_do_not_fit_are_refused(compiled):
    tokens, pools = mx.ones((20, 2, 1, 32)), (mx.zeros((1, 2, 4 * PAGE, 32)), mx.zeros((1, 2, 4 * PAGE, 32)))
    table = mx.array([1, 2], mx.int32)
    for tables, place, said in (
        ([table.astype(mx.uint32)], (0, 20, 0, 0), "a list of int32"),
        ([table[None]], (0, 20, 0, 0), "a list of int32"),
        ([table[:1]], (0, 20, 0, 0), "outside of its tokens or storage"),
        ([table], (0, 1, 9, 8), "begins with a whole block"),
        ([table, table], (0, 20, 0, 0), "one table for each span"),
    ):
        with pytest.raises(ValueError, match=said):
            native.attend_paged(tokens, None, pools, tables, [place], 1.0, 1)
    with pytest.raises(ValueError, match="storages are unlike"):
        native.attend_paged(tokens, None, (pools[0], pools[1][:, :, :PAGE]), [table], [(0, 20, 0, 0)], 1.0)


def test_a_window_forgets_whole_pages(level, rng):
    row = Row(rng, 90, 4, 2, 64, 64)
    pool = Pool(rng, [row])
    first, last = (pool.attend([row], [count], window=10)[0] for count in (75, 15))
    assert_close(np.concatenate([first, last]), expected(row, window=10))
    row.length, row.base, pool.tables = 75, 64, [pool.tables[0][4:]]
    assert np.array_equal(pool.attend([row], [15], window=10)[0], last)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_soft_cap(level, rng, softcap):
    row = Row(rng, 130, 4, 2, 64, 64)
    [output] = attend([row], [130], scale=1.0, softcap=softcap)
    assert_close(output, expected(row, scale=1.0, softcap=softcap))


def test_any_number_of_threads_gives_the_same_bits(compiled, rng):
    rows, outputs = [Row(rng, length, 9, 3, 64, 64) for length in (1400, 400)], []
    for num_threads in (1, 2, 3):
        compiled.set_num_threads(num_threads)
        for row in rows:
            row.empty()
        firsts = attend(rows, [1100, 395])
        lasts = [attend(rows, [1, 1]) for _ in range(5)]
        outputs.append(np.concatenate([*firsts, *(each for last in lasts for each in last)]))
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


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dims=st.one_of(
        st.sampled_from([64, 128, 256]).map(lambda dim: (dim, dim)),
        st.tuples(st.integers(1, 140), st.integers(1, 140)),
    ),
    window=st.one_of(st.integers(0, 50), st.integers(500, 600)),
    cuts=st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3), min_size=1, max_size=4),
    long=st.sampled_from([0, 0, 490, 1030]),
    dtype=st.sampled_from(TYPES),
    softcap=st.sampled_from([0.0, 0.0, 4.0]),
    sinks=st.booleans(),
    level=st.integers(0, 5),
)
def test_any_spans(seed, key_heads, group, dims, window, cuts, long, dtype, softcap, sinks, level):
    if isinstance(native.start(2), str):
        pytest.skip("kernels: portable")
    package = native.mlxcel_native
    package.use_level(package.levels()[level % len(package.levels())])
    rng = np.random.default_rng(seed)
    heads = key_heads * group
    cuts = [[1, 1, long + 1], *cuts]
    rows = [Row(rng, sum(counts), heads, key_heads, *dims, dtype=dtype) for counts in zip(*cuts, strict=True)]
    options = {"scale": dims[0] ** -0.5, "window": window, "softcap": softcap}
    options["sinks"] = sinks_of(rng, heads) if sinks else None
    pool = Pool(rng, rows)
    paged = [pool.attend(rows, counts, **options) for counts in cuts]
    for row, outputs in zip(rows, zip(*paged, strict=True), strict=True):
        row.empty()
        [alone] = attend([row], [len(row.queries)], **options)
        assert np.array_equal(np.concatenate(outputs), alone)
        assert_close(alone, expected(row, **options))
    package.use_level(package.levels()[0])
