"""A recorded decode step gives the bits of a plain one, for any number of rows and at any position."""

import mlx.core as mx
import pytest

from engine.cache.pages import Pages
from engine.forward import Span, SpansForward
from engine.kernels import leaves, native
from engine.recorded import NUM_CHECKED, PLAIN_FIRST
from tests.adapters import write_adapter
from tests.engines import Watched
from tests.tiny import VOCAB_SIZE
from tests.zoo import zoo_loaded, zoo_model

FAMILIES = ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v2", "hunyuan", "internlm2", "gemma3n"]


@pytest.fixture(autouse=True)
def _kernels():
    if isinstance(started := native.start(2), str):
        pytest.skip(f"kernels: portable ({started})")


def forward_of(name: str) -> SpansForward:
    model = zoo_model(name)
    leaves.replace(model)
    forward = Watched(zoo_loaded(model), mode="spans").engine._forward
    assert isinstance(forward, SpansForward)
    return forward


def steps(forward: SpansForward, lengths: list[int], num_steps: int) -> list[mx.array]:
    """Logits of some steps of rows with prompts of these lengths."""
    rows = [forward.open() for _ in lengths]
    for row, length in zip(rows, lengths, strict=True):
        prompt = [(7 * i + length) % VOCAB_SIZE for i in range(length)]
        mx.eval(forward.run([Span(row, prompt, num_sampled=1)]), *row.arrays())
    logits = []
    for step in range(num_steps):
        spans = [
            Span(row, [(11 * step + length) % VOCAB_SIZE], 1) for row, length in zip(rows, lengths, strict=True)
        ]
        logits.append(forward.run(spans))
        mx.eval(logits, *(row.arrays() for row in rows))
    return logits


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("lengths", [[3], [9, 1, 40]], ids=["one row", "three rows"])
def test_a_recorded_step_is_a_plain_one(name, lengths):
    """Longer than the check of the first steps lasts, past windows and a growing storage."""
    recorded, plain = forward_of(name), forward_of(name)
    plain._recorded = None
    num_steps = NUM_CHECKED + 20
    for one, other in zip(steps(recorded, lengths, num_steps), steps(plain, lengths, num_steps), strict=True):
        assert mx.array_equal(one, other)
    assert recorded._recorded is not None
    assert recorded._recorded.reason is None


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "hunyuan"])
def test_several_tokens_of_a_row_are_one_after_the_other(name, paged):
    """Rows bring one token or several, some of which are forgotten again; a window is passed on the way."""
    together, plain = forward_of(name), forward_of(name)
    plain._recorded = None
    if paged:
        together.pages = Pages(together.kinds, together.cache_dtype)
    counts = [(1, 4), (4, 1), (3, 3), (2, 5), (6, 1)]
    rows, others = ([forward.open() for _ in range(2)] for forward in (together, plain))
    for forward, opened in ((together, rows), (plain, others)):
        for row, length in zip(opened, (7, 21), strict=True):
            mx.eval(forward.run([Span(row, list(range(length)), 1)]), *row.arrays())
    for step in range(25):
        tokens = [[(11 * step + 3 * i) % VOCAB_SIZE for i in range(count)] for count in counts[step % 5]]
        logits = together.run([Span(row, ids, len(ids)) for row, ids in zip(rows, tokens, strict=True)])
        mx.eval(logits, *(row.arrays() for row in rows))
        forgotten = [step % len(ids) for ids in tokens]
        expected = []
        for row, ids, count in zip(others, tokens, forgotten, strict=True):
            for at, token in enumerate(ids):
                expected.append(plain.run([Span(row, [token], 1)]))
                mx.eval(expected[-1], *row.arrays())
                if at == len(ids) - count - 1:
                    break
            expected += [None] * count
        for one, other in zip(logits, expected, strict=True):
            assert other is None or mx.array_equal(one, other[0])
        for row, count in zip(rows, forgotten, strict=True):
            row.rewind(count)
        assert [row.length for row in rows] == [row.length for row in others]
    assert together._recorded.reason is None


def test_storage_grows_under_a_recording():
    recorded, plain = forward_of("llama"), forward_of("llama")
    plain._recorded = None
    one, other = steps(recorded, [250], 12), steps(plain, [250], 12)
    assert all(mx.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_model_that_looks_at_values_runs_unrecorded():
    forward = forward_of("llama")
    model, original = forward._model, type(forward._model).__call__

    def call(self, ids, **options):
        ids.sum().item()
        return original(self, ids, **options)

    model.__class__ = type("Looking", (type(model),), {"__call__": call})
    steps(forward, [3], 3)
    assert "cannot be recorded" in forward._recorded.reason


def test_a_recording_that_is_wrong_is_dropped(monkeypatch):
    forward, plain = forward_of("llama"), forward_of("llama")
    plain._recorded = None
    run = native.Recording.run
    monkeypatch.setattr(native.Recording, "run", lambda *arguments: run(*arguments) + 1)
    one, other = steps(forward, [5], 4), steps(plain, [5], 4)
    assert all(mx.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert "differs" in forward._recorded.reason


def test_layouts_of_adapters_that_last_are_recorded_and_few_are_kept(tmp_path, monkeypatch):
    """One that two steps have is not; of many the one unused for longest goes, and a mount forgets them all."""
    monkeypatch.setattr("engine.recorded.MOST_ADAPTED", 2)
    model = zoo_model("llama")
    leaves.replace(model)
    watched = Watched(zoo_loaded(model), mode="spans", parallel=4)
    for seed, name in enumerate(("a", "b")):
        watched.engine.adapters.mount(name, write_adapter(tmp_path / name, model, seed=seed))
    forward = watched.engine._forward
    recorded = forward._recorded

    def layouts():
        return [key[1] for key in recorded._recordings if key[1]]

    def step(slots, num_steps):
        rows = [forward.open_dense() for _ in slots]
        for row, slot in zip(rows, slots, strict=True):
            mx.eval(forward.run([Span(row, [3, 5, 7], 1, adapter=slot)]), *row.arrays())
        for _ in range(num_steps):
            mx.eval(forward.run([Span(row, [9], 1, adapter=slot) for row, slot in zip(rows, slots, strict=True)]))

    recorded.forget_adapted()
    step([1, 2], PLAIN_FIRST)
    assert layouts() == []
    step([2, 1], NUM_CHECKED + 2)  # the same layout, in another order
    assert layouts() == [(1, 2)]
    for slots in ([0, 1], [1, 2], [2, 2]):
        step(slots, PLAIN_FIRST + 1)
    assert layouts() == [(1, 2), (2, 2)]
    assert recorded.reason is None
    step([0, 0], 3)
    watched.engine.adapters.mount("c", write_adapter(tmp_path / "c", model, seed=3))
    assert layouts() == []
    assert (2, ()) in recorded._recordings
