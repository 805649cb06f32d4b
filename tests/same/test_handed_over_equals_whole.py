"""A row that goes on in another engine ends as it does in one: with what it has stored, or computed again."""

import dataclasses

import numpy as np
import pytest

from engine.handover import Arriving
from engine.request import Grammar, Handed, Output, Request, Resumed, Sampling
from engine.scheduler import Scheduler
from tests.engines import BACKENDS, Watched
from tests.tiny import write_checkpoint
from tests.zoo import ZOO, zoo_loaded, zoo_model

# Plain, sliding-window and latent attention; recurrent states, alone and beside attention; mlx-lm's own caches.
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v2", "mamba2", "qwen3_next", "granitemoehybrid", "jamba")
SAMPLINGS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
    "steered": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 4.0, "dry_multiplier": 2.0},
}


def run(engine, request, arriving=None, others=()):
    """The events of one request, as the loop has them; a row that leaves gives everything up at the end."""
    scheduler = Scheduler(engine.plan(), num_slots=2, memory=engine.memory, drafts=engine.drafts)
    row = engine.submit(request)
    row.arriving = arriving
    scheduler.add(row)
    events = []
    while scheduler.has_work:
        new = engine.run(scheduler.tick())
        scheduler.settle(new)
        scheduler.check()
        events += new
    if row.is_leaving:
        (state,) = (event.departing for event in events if isinstance(event, Handed))
        events.append(Arriving(state.state, bytearray(b"".join(state.buffers))))
        scheduler.remove(row)
        engine.cancel(row)
    assert row.storage is None
    assert not scheduler.slots[0]
    engine.prompts.check(others)
    return [event.token for event in events if isinstance(event, Output)], row, events


def resumed(request, events, outputs, **more):
    """The request as whoever follows it would send it on."""
    released = sum(len(output.logprobs) for output in outputs)
    drawn = [output.drawn for output in outputs if output.drawn is not None]
    last = outputs[-1]
    begun = Resumed(tuple(output.token for output in outputs), tuple(drawn[released:]), last.mu)
    return dataclasses.replace(request, resumed=begun, **more)


def said(outputs):
    return (
        [output.token for output in outputs],
        "".join(output.text for output in outputs),
        [(part.kind, part.text) for output in outputs for part in output.parts],
        [logprob for output in outputs for logprob in output.logprobs],
        outputs[-1].finish_reason,
        outputs[-1].row.stop_string,
    )


def assert_hands_over(source, target, request):
    """Hand `request` over behind each of its first tokens, with its state and without: it ends as alone."""
    *_, events = run(target.engine, request)
    whole = [event for event in events if isinstance(event, Output)]
    for num_before in range(min(4, len(whole) - 1)):
        begun = dataclasses.replace(request, hands_over=True)
        if num_before:
            begun = resumed(request, events, whole[:num_before], hands_over=True)
        *_, left = run(source.engine, begun)
        first = [event for event in left if isinstance(event, Output)]
        assert len(first) == 1
        before = [*whole[:num_before], *first]
        for arriving in (left[-1], None):
            if arriving is not None:
                tokens = len(request.prompt) + num_before
                unfit = arriving.state.unfit(
                    target.engine.transfer.identity, num_tokens=tokens, most_bytes=1 << 40
                )
                assert unfit is None
                assert len(arriving.data) == arriving.state.num_bytes
            _, _, after = run(target.engine, resumed(request, events, before), arriving)
            assert said([*before, *(event for event in after if isinstance(event, Output))]) == said(whole)


def zoo_pair(family, **config):
    model = zoo_loaded(zoo_model(family))
    return [Watched(model, mode=ZOO[family].mode.split(",")[0], no_prompt_cache=False, **config) for _ in range(2)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_any_kind_goes_on_elsewhere(family, sampling):
    source, target = zoo_pair(family, portable=True)
    assert_hands_over(source, target, source.request("r", 37, 9, seed=5, **SAMPLINGS[sampling]))


@pytest.mark.parametrize("into", BACKENDS)
@pytest.mark.parametrize("out_of", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_storages_may_differ(tmp_path, family, out_of, into):
    folder = write_checkpoint(tmp_path / "model", family)
    pair = [
        Watched(folder, no_prompt_cache=False, decode_storage_backend=backend, parallel=2)
        for backend in (out_of, into)
    ]
    for num_prompt in (5, 16, 37, 64, 100):
        request = pair[0].request("r", num_prompt, 9, seed=num_prompt, temperature=1.0)
        assert_hands_over(*pair, request)
        # What came from elsewhere is kept for others like what was computed here.
        again = dataclasses.replace(request, id="again", prompt=(*request.prompt, 3, 4, 5))
        warm, row, _ = run(pair[1].engine, again)
        cold, *_ = run(pair[1].engine, dataclasses.replace(again, cache_prompt=False))
        assert warm == cold
        assert row.num_cached >= num_prompt // 16 * 16 - 16


def test_text_logprobs_stops_and_grammars_go_on(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    source, target = [Watched(folder, no_prompt_cache=False) for _ in range(2)]
    prompt = tuple(b"a question")
    drawn = Sampling(temperature=1.5, seed=3)
    requests = [
        Request("logprobs", prompt, drawn, 12, stop=("zz", "never said at all"), top_logprobs=3),
        Request("ends", prompt, drawn, 40),
        Request("digits", prompt, drawn, 12, grammar=Grammar("regex", "[0-9]{3,8}x?"), top_logprobs=0),
    ]
    outputs = [e for e in run(target.engine, requests[0])[2] if isinstance(e, Output)]
    text = "".join(output.text for output in outputs)
    requests.append(dataclasses.replace(requests[0], id="stops", stop=(text[4:7],)))
    for request in requests:
        assert_hands_over(source, target, request)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    source = Watched(write_checkpoint(tmp_path / "one"), portable=True)
    *_, events = run(source.engine, dataclasses.replace(source.request("r", 20, 4), hands_over=True))
    state = events[-1].state
    here = source.engine.transfer.identity
    assert state.unfit(here, num_tokens=20, most_bytes=1 << 30) is None
    assert "21" in state.unfit(here, num_tokens=21, most_bytes=1 << 30)
    assert "bytes" in state.unfit(here, num_tokens=20, most_bytes=100)
    other = Watched(write_checkpoint(tmp_path / "two", seed=1), portable=True).engine.transfer.identity
    assert "model" in state.unfit(other, num_tokens=20, most_bytes=1 << 30)
    layers = dataclasses.replace(here, layers=(here.layers[0], "window 8"))
    assert "layer 1" in state.unfit(layers, num_tokens=20, most_bytes=1 << 30)
    halves = Watched(tmp_path / "one", portable=True, cache_dtype="float16").engine.transfer.identity
    assert "float16" in state.unfit(halves, num_tokens=20, most_bytes=1 << 30)
    keys = dataclasses.replace(state.arrays[0], shape=(1, 7, 20, 8))
    assert "layer 0" in dataclasses.replace(state, arrays=(keys, *state.arrays[1:])).unfit(
        here, num_tokens=20, most_bytes=1 << 30
    )
    keys = dataclasses.replace(state.arrays[0], shape=(1 << 60, 2, 20, 8))
    assert "size" in dataclasses.replace(state, arrays=(keys, *state.arrays[1:])).unfit(
        here, num_tokens=20, most_bytes=1 << 30
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_leaves_is_read_where_it_lies(tmp_path, backend):
    watched = Watched(write_checkpoint(tmp_path / "model"), decode_storage_backend=backend, parallel=2)
    engine = watched.engine
    row = engine.submit(dataclasses.replace(watched.request("r", 200, 4), hands_over=True))
    watched.store(row, 64)
    held = [layer.pool if backend == "paged" else layer for layer in row.storage.attention_layers()]
    arrays = [
        np.asarray(array)
        for layer in held
        for array in (layer.arrays() if backend == "paged" else layer.stored()[:2])
    ]
    for buffer in engine.transfer.departing(row.storage).buffers:
        assert any(np.shares_memory(np.frombuffer(buffer, np.uint8), array) for array in arrays)
    engine.cancel(row)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_leaves_stays_what_it_is_while_others_run(tmp_path, backend):
    """Others share its blocks, go on in copies of them, and have the pool grow."""
    watched = Watched(
        write_checkpoint(tmp_path / "model"), no_prompt_cache=False, decode_storage_backend=backend, parallel=4,
        kv_unified=True,
    )  # fmt: skip
    engine = watched.engine
    asked = watched.request("leaves", 43, 4)
    row = engine.submit(dataclasses.replace(asked, hands_over=True))
    watched.store(row, 64)
    departing = engine.transfer.departing(row.storage)
    before = b"".join(departing.buffers)
    for number in range(6):
        prompt = (*asked.prompt[: 30 + 2 * number], *range(number + 1))
        run(
            engine,
            dataclasses.replace(asked, id=str(number), prompt=prompt, max_tokens=60 * number + 1),
            others=[row],
        )
    assert b"".join(departing.buffers) == before
    engine.cancel(row)
