"""A row that is preempted, however often, ends as it does alone: same tokens, and in spans mode the same bits."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import PRIORITIES
from engine.scheduler import Scheduler
from engine.size import Bound
from tests.engines import BACKENDS, Watched, drive
from tests.tiny import write_checkpoint
from tests.zoo import ZOO, zoo_loaded, zoo_model

NUM_USERS = 12
PREFIX = 40
# Plain, sliding-window and latent attention; recurrent states, alone and beside attention.
FAMILIES = (
    "llama",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "mamba2",
    "qwen3_next",
    "granitemoehybrid",
)
SAMPLINGS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
    "steered": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 4.0, "dry_multiplier": 2.0},
}


def users(watched, count=NUM_USERS, *, num_new=16, base=3, **sampling):
    """Requests over one prefix, each with a question and a seed of its own."""
    prefix = tuple((7 * i + 3) % 250 for i in range(PREFIX))
    requests = [
        watched.request(str(user), base + 2 * user, num_new + user % 5, seed=user, **sampling)
        for user in range(count)
    ]
    return [dataclasses.replace(request, prompt=prefix + request.prompt) for request in requests]


def undisturbed(watched, requests):
    watched.logits.clear()
    return [watched.alone(request) for request in requests], dict(watched.logits)


def assert_same(watched, requests):
    """Run `requests` together and each alone; some are preempted."""
    expected, logits = undisturbed(watched, requests)
    watched.logits.clear()
    outputs, rows = drive(watched.engine, requests)
    assert outputs == expected
    assert sum(row.num_preempted for row in rows) > 0
    if watched.engine.mode == "spans":
        assert watched.logits.keys() == logits.keys()
        assert all(np.array_equal(watched.logits[key], logits[key]) for key in logits)


class Lives:
    """Rows of one engine that come, run, are preempted and go, as `steps` say."""

    def __init__(self, watched):
        self.engine, self.prompts = watched.engine, watched.engine.prompts
        self.scheduler = Scheduler(self.engine.plan(), num_slots=3, memory=self.engine.memory, preempts=True)
        self.rows = []

    def add(self, request):
        self.rows.append(self.engine.submit(request))
        self.scheduler.add(self.rows[-1])

    def step(self):
        if tick := self.scheduler.tick():
            self.scheduler.settle(self.engine.run(tick))
        self.check()

    def cancel(self, row):
        self.scheduler.remove(row)
        self.engine.cancel(row)

    def check(self):
        self.scheduler.check()
        self.prompts.check(self.scheduler.rows)
        assert all(row.storage is None for row in self.scheduler.waiting), "a row that waits holds storage"


@pytest.mark.parametrize(("sampling", "cached"), [("greedy", False), ("drawn", True), ("steered", True)])
@pytest.mark.parametrize("name", FAMILIES)
def test_users_over_one_prefix_in_a_context_too_small_for_them(name, cached, sampling):
    watched = Watched(
        zoo_loaded(zoo_model(name)),
        mode=ZOO[name].mode,
        ctx_size=4 * (PREFIX + 24),
        no_prompt_cache=not cached,
    )
    assert_same(watched, users(watched, **SAMPLINGS[sampling]))


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cached"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v2", "qwen3_next"])
def test_users_in_memory_too_small_for_them(name, cached):
    """Buffers grow in steps, so rows that are about to need the next one meet the budget together."""
    probe = Watched(zoo_loaded(zoo_model(name)), mode=ZOO[name].mode)
    one, two = probe.engine.memory.row_bytes(10), probe.engine.memory.row_bytes(300)
    watched = Watched(
        zoo_loaded(zoo_model(name)),
        mode=ZOO[name].mode,
        kv_cache_budget=Bound(3 * one + 2 * (two - one)),
        no_prompt_cache=not cached,
    )
    assert_same(watched, users(watched, 5, num_new=16, base=153))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rows_that_fit_one_by_one_all_end_as_they_would(family, backend, tmp_path):
    """Of several that outgrow memory together as few give way as must, and none is cut short."""
    folder = write_checkpoint(tmp_path, family)
    one = Watched(folder, decode_storage_backend=backend).engine.memory
    watched = Watched(folder, decode_storage_backend=backend, kv_cache_budget=Bound(one.row_bytes(330)))
    requests = [watched.request(str(user), 20, 300, seed=user) for user in range(3)]
    expected, _ = undisturbed(watched, requests)
    outputs, rows = drive(watched.engine, requests)
    assert outputs == expected
    assert (family == "llama") <= sum(row.num_preempted for row in rows) <= 4


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_with_a_step_in_flight(family, tmp_path):
    """Nobody is preempted whom an unread step still holds; its token is neither lost nor given twice."""
    watched = Watched(write_checkpoint(tmp_path, family), ctx_size=4 * (PREFIX + 24), lookahead=True)
    assert_same(watched, users(watched))
    assert watched.engine._in_flight is None


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_for_a_row_of_higher_priority(name):
    watched = Watched(zoo_loaded(zoo_model(name)), mode=ZOO[name].mode, ctx_size=110, no_prompt_cache=False)
    low, high = users(watched, 2, num_new=60)
    low, high = dataclasses.replace(low, priority="low"), dataclasses.replace(high, priority="high")
    expected, _ = undisturbed(watched, [low, high])
    lives = Lives(watched)
    lives.add(low)
    while not lives.rows[0].output[20:]:
        lives.step()
    lives.add(high)
    while lives.scheduler.has_work:
        lives.step()
    assert [row.output for row in lives.rows] == expected
    assert [row.num_preempted for row in lives.rows] == [1, 0]


# A context, or memory, that holds about two of the rows; paged ones hold their common prefix once.
CROWDS = {
    "read": {"ctx_size": 90},
    "ahead": {"ctx_size": 90, "lookahead": True},
    "dense": {"ctx_size": 90, "decode_storage_backend": "dense"},
    "memory": {"kv_cache_budget": 150},
}


@pytest.fixture(scope="module", params=CROWDS)
def crowded(request, tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"))
    config = {**CROWDS[request.param]}
    if tokens := config.get("kv_cache_budget"):
        config["kv_cache_budget"] = Bound(Watched(folder).engine.memory.row_bytes(tokens))
    watched = Watched(folder, **config, no_prompt_cache=False, prefill_chunk_size=16)
    return watched, functools.cache(Watched(folder).alone)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 5), st.sampled_from(PRIORITIES)),
            st.tuples(st.just("step"), st.integers(1, 12)),
            st.tuples(st.just("cancel"), st.integers(0, 3)),
            st.tuples(st.just("evict"), st.integers(1, 5000)),
        ),
        max_size=25,
    )
)
def test_whatever_happens_to_a_real_engine(crowded, steps):
    watched, alone = crowded
    watched.engine.prompts.reset()
    lives = Lives(watched)
    requests = users(watched, 6, num_new=30, temperature=0.7)
    try:
        live(lives, steps, requests)
    except BaseException:
        for row in lives.scheduler.rows:
            lives.cancel(row)
        raise
    for row in lives.rows:
        expected = alone(dataclasses.replace(row.request, priority="normal"))
        assert row.output == expected[: len(row.output)]
        assert row.finish_reason == "cancelled" or len(row.output) == len(expected)
        assert row.storage is None


def live(lives, steps, requests):
    for name, *values in steps:
        match name:
            case "add":
                lives.add(dataclasses.replace(requests[values[0]], priority=values[1]))
            case "step":
                for _ in range(values[0]):
                    lives.step()
            case "cancel":
                live = lives.scheduler.rows
                if values[0] < len(live):
                    lives.cancel(live[values[0]])
            case "evict":
                lives.prompts.evict(values[0])
        lives.check()
    while lives.scheduler.has_work:
        lives.step()
