"""`Recording`: what it refuses, and what it gives where calls of it meet each other or fail."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from engine.kernels import native
from tests.threads import aside, in_threads

VOCAB_SIZE, NUM_HEADS, DIM, CAPACITY = 16, 2, 8, 64

pytestmark = pytest.mark.usefixtures("compiled")


def recorded(num_rows=1, num_layers=1, key_heads=1, window=0, then=lambda hidden: hidden):
    """Embedding, `num_layers` times attention and `then`, and the head: logits `[rows, vocab]`."""
    rng = np.random.default_rng(0)
    width = NUM_HEADS * DIM
    embedding = mx.array(rng.standard_normal((VOCAB_SIZE, width)).astype(np.float32))
    weight = mx.array(rng.normal(0, 0.1, (key_heads * DIM, width)).astype(np.float32))
    ids, positions = native.unknown(num_rows, 1), native.unknown(num_rows)
    hidden = native.embed(ids, embedding)
    for layer in range(num_layers):
        queries = hidden.reshape(num_rows, 1, NUM_HEADS, DIM).transpose(0, 2, 1, 3)
        queries = native.rope(queries, DIM, False, 1e4, 1.0, positions)
        keys = native.linear(hidden, weight).reshape(num_rows, 1, key_heads, DIM).transpose(0, 2, 1, 3)
        attended = native.attend_in_recording(queries, (keys, keys), True, layer, 0.3, window)
        hidden = then(hidden + attended.transpose(0, 2, 1, 3).reshape(num_rows, 1, width))
    return native.Recording(ids, positions, native.linear(hidden, embedding)[:, -1], num_layers)


def storage(num_rows=1, num_layers=1, key_heads=1, capacity=CAPACITY, dim=DIM, dtype=mx.float32):
    arrays = [mx.zeros((1, key_heads, capacity, dim), dtype) for _ in range(2 * num_rows * num_layers)]
    mx.eval(arrays)
    return arrays


def queries_of(ids, num_heads=1):
    """Queries, keys or values `[rows, heads, 1, DIM]` that follow from `ids`."""
    return native.embed(ids, mx.ones((4, num_heads * DIM))).reshape(ids.shape[0], num_heads, 1, DIM)


@pytest.mark.parametrize("count", [3, 40], ids=["stored where they attend", "stored before"])
def test_tokens_of_one_row_are_steps_of_it(count):
    """Of many tokens of a row, those of 32 and more here, all are stored before any attends."""
    ids = [(5 * i + 2) % VOCAB_SIZE for i in range(count)]
    together, alone = storage(), storage()
    logits = recorded(num_rows=count, num_layers=1).run(ids, list(range(count)), together, [0], counts=[count])
    one = recorded()
    expected = [one.run([token], [at], alone, [0]) for at, token in enumerate(ids)]
    assert mx.array_equal(logits, mx.concatenate(expected))
    assert all(mx.array_equal(*pair) for pair in zip(together, alone, strict=True))


@pytest.mark.parametrize(
    ("positions", "counts", "why"),
    [
        ([0, 1], [1], "other tokens than the step"),
        ([0, 1], [3], "other tokens than the step"),
        ([0, 1], [0, 2], "other tokens than the step"),
        ([0, 2], [2], "follow each other"),
        ([CAPACITY - 1, CAPACITY], [2], "no room"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_the_step_are_refused(positions, counts, why):
    with pytest.raises(ValueError, match=why):
        recorded(num_rows=2).run([3, 4], positions, storage(), [0], counts=counts)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dim": DIM // 2}, "another shape"),
        ({"key_heads": 1}, "another shape"),
        ({"key_heads": 4}, "another shape"),
        ({"dtype": mx.int32}, "of a float type"),
        ({"capacity": 0}, "no room"),
    ],
    ids=str,
)
def test_storage_that_does_not_fit_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        recorded(key_heads=2).run([3], [0], storage(**{"key_heads": 2, **given}), [0])


@pytest.mark.parametrize(
    ("window", "position", "base", "why"),
    [
        (0, CAPACITY, 0, "no room"),
        (0, 3, 4, "no room"),
        (0, -3, -5, "no room"),
        (0, 3, -(2**63), "no room"),
        (0, 10, 5, "begins after"),
        (4, 10, 8, "begins after"),
    ],
)
def test_a_place_outside_of_storage_is_refused(window, position, base, why):
    with pytest.raises(ValueError, match=why):
        recorded(window=window).run([3], [position], storage(), [base])


def test_what_a_window_forgot_is_not_missed():
    """A storage that begins with the first position seen gives the bits of one that has them all."""
    step, rng = recorded(window=4), np.random.default_rng(1)
    whole = [mx.array(rng.standard_normal((1, 1, CAPACITY, DIM)).astype(np.float32)) for _ in range(2)]
    cut = [mx.contiguous(array[:, :, 7:]) for array in whole]
    mx.eval(whole, cut)
    assert mx.array_equal(step.run([3], [10], whole, [0]), step.run([3], [10], cut, [7]))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("num_layers", "layer"), [(1, 1), (1, -1), (0, 0)])
def test_an_attention_of_no_layer_is_refused(num_rows, num_layers, layer):
    ids, positions = native.unknown(num_rows, 1), native.unknown(num_rows)
    queries = queries_of(ids)
    attended = native.attend_in_recording(queries, (queries, queries), True, layer, 0.3)
    with pytest.raises(ValueError, match="other tokens or layers"):
        native.Recording(ids, positions, attended.reshape(num_rows, DIM), num_layers)


def test_an_attention_of_other_rows_is_refused():
    ids, positions = native.unknown(300, 1), native.unknown(1)
    queries = queries_of(ids)
    attended = native.attend_in_recording(queries, (queries, queries), True, 0, 0.3)
    with pytest.raises(ValueError, match="other tokens or layers"):
        native.Recording(ids, positions, attended.reshape(300, DIM), 1)


def test_attentions_of_one_layer_are_alike():
    ids, positions = native.unknown(1, 1), native.unknown(1)
    queries = queries_of(ids, num_heads=2)
    keys = queries_of(ids)
    first = native.attend_in_recording(queries, (queries, queries), True, 0, 0.3)
    second = native.attend_in_recording(first, (keys, keys), False, 0, 0.3)
    with pytest.raises(ValueError, match="unlike"):
        native.Recording(ids, positions, second.reshape(1, 2 * DIM), 1)


@pytest.mark.parametrize(
    ("key_heads", "dim", "sinks", "window"),
    [(0, DIM, None, 0), (1, 0, None, 0), (1, DIM, 1, 0), (1, DIM, None, -1)],
    ids=["no key heads", "no dimensions", "too few sinks", "a window of less than nothing"],
)
def test_an_attention_that_does_not_fit_is_refused(key_heads, dim, sinks, window):
    queries, keys = mx.zeros((1, 4, 1, dim)), mx.zeros((1, key_heads, 1, dim))
    with pytest.raises(ValueError, match=r"fit each other|one sink|window"):
        native.attend_in_recording(queries, (keys, keys), True, 0, 0.3, window, sinks and mx.ones(sinks))


def test_ids_of_no_row_show_in_the_result():
    """Only in the result of that row."""
    step = recorded(num_rows=3)
    logits = step.run([-3, 5, 2**31 - 1], [0] * 3, storage(3), [0] * 3)
    alone = recorded().run([5], [0], storage(), [0])
    assert mx.all(mx.isnan(logits[0::2]))
    assert mx.array_equal(logits[1:2], alone)


def test_a_step_of_no_rows():
    assert recorded(num_rows=0).run([], [], [], []).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("first", [0, 1], ids=["the dense rows first", "the rows that lie apart first"])
def test_rows_that_begin_alike_but_lie_apart_are_laid_out_each(first):
    """The first two rows of both are the same ones, so that one could be taken for the other."""
    rng = np.random.default_rng(2)
    embedding, weight = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in ((8, 192), (5, 32)))

    def products(ids):
        lines = native.embed(ids, embedding).reshape(2, 3, 64)
        apart, along = lines[:, :2, :32], lines.reshape(6, 64)[:4, :32]
        made = [native.linear(x, weight).reshape(2, -1) for x in ((along, apart), (apart, along))[first]]
        return mx.concatenate(made, axis=1)

    ids, positions = native.unknown(2, 1), native.unknown(2)
    step = native.Recording(ids, positions, products(ids), 0)
    assert mx.array_equal(step.run([1, 2], [0, 0], [], []), products(mx.array([[1], [2]])))


@aside
def test_an_operation_that_fails_fails_its_step_alone():
    """MLX's own operation raises where the matrix has no inverse, and the recording goes on with the next step."""
    embedding = mx.array([[0.0, 0, 0, 0], [1, 0, 0, 1]])
    ids, positions = native.unknown(1, 1), native.unknown(1)
    ones = mx.floor(mx.cos(native.embed(ids, embedding).reshape(2, 2)))
    inverse = mx.linalg.inv(mx.where(mx.eye(2) > 0, ones, 0.0), stream=mx.cpu)
    step = native.Recording(ids, positions, native.rms_norm(inverse.reshape(1, 4), None, 0.0), 0)
    assert "Inverse" in step.foreign
    expected = step.run([0], [0], [], [])
    for _ in range(3):
        with pytest.raises(RuntimeError, match="Inverse"):
            step.run([1], [0], [], [])
        assert mx.array_equal(step.run([0], [0], [], []), expected)


def test_threads_that_run_one_recording_take_turns():
    num_layers, num_steps = 40, 50
    step = recorded(num_rows=2, num_layers=num_layers)

    def run(token, arrays):
        return step.run([token, token + 1], [0, 0], arrays, [0] * 2 * num_layers)

    expected = [np.array(run(token, storage(2, num_layers))) for token in range(4)]
    given = [storage(2, num_layers) for _ in range(3)]

    def steps(thread):
        for i in range(num_steps):
            token = (i + thread) % 4
            assert np.array_equal(np.array(run(token, given[thread])), expected[token])

    in_threads(3, steps)


def test_threads_are_set_while_a_recording_runs(compiled):
    step, arrays, running = recorded(then=mx.sin), storage(), threading.Event()
    expected = step.run([3], [0], arrays, [0])

    def setting(_):
        for i in range(1000):
            compiled.set_num_threads(1 + i % 5)
        running.set()

    setter = threading.Thread(target=setting, args=(0,))
    setter.start()
    while not running.is_set():
        assert mx.array_equal(step.run([3], [0], arrays, [0]), expected)
    setter.join()


def test_a_recording_runs_on_any_thread_as_far_as_mlx_does():
    """Its kernels run anywhere; a stream of MLX's belongs to the thread that made it, and says so."""
    own, foreign, arrays = recorded(), recorded(then=mx.sin), storage()
    expected, after = own.run([3], [0], arrays, [0]), foreign.run([3], [0], arrays, [0])

    def run(_):
        assert np.array_equal(np.array(own.run([3], [0], arrays, [0])), np.array(expected))
        with pytest.raises(RuntimeError, match="Stream"):
            foreign.run([3], [0], arrays, [0])

    in_threads(1, run)
    assert mx.array_equal(foreign.run([3], [0], arrays, [0]), after)
