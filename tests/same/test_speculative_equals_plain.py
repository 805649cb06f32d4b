"""Several tokens a step give the answer that one a step gives: same tokens, and in spans mode the same bits.

What is drafted does not matter: here it is the right answer with faults in it, or what a prompt says.
"""

import dataclasses

import numpy as np
import pytest

from engine.kernels import leaves
from engine.request import Failed, Loops, Sampling, ThinkingBudget
from engine.scheduler import Scheduler
from engine.size import Bound
from engine.speculate.drafts import PromptLookup
from engine.speculate.governor import Costs, Governor
from engine.speculate.lookup import KINDS
from engine.text.filter import Markup
from tests.engines import BACKENDS, Guesses, Watched, drive
from tests.zoo import ZOO, zoo_loaded, zoo_model

SAMPLINGS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_k": 40, "top_p": 0.95},
    "looks back": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "dry_multiplier": 1.0},
    "chances": {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "dynatemp_range": 0.5},
}
FREE = Costs({1: 1.0, 64: 1.0})  # several tokens cost what one does


def lookup(max_rows: int = 4) -> PromptLookup:
    """Prompt lookup that always pays."""
    governor = Governor(FREE, FREE, guesses=[guess for _, guess in KINDS])
    return PromptLookup(governor, max_rows=max_rows, block_size=7)


ARMS = ["portable", *(BACKENDS if "paged" in BACKENDS else [])]


def opened(arm, name="llama", **config):
    """The zoo's model on MLX's own operations, or on the kernels with rows that are dense or paged."""
    model = zoo_model(name)
    backend = "dense" if arm == "portable" else arm
    if arm != "portable":
        leaves.replace(model)
    config = {"parallel": 4, "decode_storage_backend": backend, **config}
    return Watched(zoo_loaded(model), mode=ZOO[name].mode, **config)


@pytest.fixture(scope="module", params=ARMS)
def watched(request):
    return opened(request.param)


def assert_same(watched, requests, **config):
    """Run the requests together, drafting, and each alone; what the drafts came to."""
    watched.logits.clear()
    alone = {request.id: watched.alone(request) for request in requests}
    expected = dict(watched.logits)
    watched.logits.clear()
    guesses = Guesses(alone, **config)
    outputs, rows = drive(watched.engine, requests, drafts=guesses)
    assert outputs == list(alone.values())
    assert all(np.array_equal(watched.logits[key], expected[key]) for key in expected)
    for row in rows:
        assert row.drafts.accepted <= row.drafts.proposed
    return guesses


@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_that_draft(watched, sampling, num_rows):
    requests = [watched.request(str(i), 5 + 9 * i, 30 + i, seed=i, **SAMPLINGS[sampling]) for i in range(num_rows)]
    guesses = assert_same(watched, requests)
    assert guesses.num_accepted > 10 * num_rows


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "deepseek_v2", "qwen3_moe"])
def test_windows_sinks_and_experts(name, arm):
    """Answers pass the window, with blocks that it lets go of."""
    watched = opened(arm, name)
    assert_same(watched, [watched.request(str(i), 6 + 30 * i, 60, seed=i, temperature=0.7) for i in range(2)])


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9])
def test_the_bound_on_tokens_within_a_block(watched, max_tokens):
    assert_same(watched, [watched.request("short", 5, max_tokens, seed=3)], most=16)


def test_the_context_ends_within_a_block():
    watched = opened("portable", ctx_size=32, kv_unified=True)
    request = dataclasses.replace(watched.request("full", 20, 5), max_tokens=None)
    assert_same(watched, [request], most=16)


def ended(watched, request, drafts=None):
    """Text, reason, and what the row became; `drafts` None: one token a step."""
    outputs, rows = drive(watched.engine, [request], drafts=drafts)
    row = rows[0]
    return outputs[0], row.finish_reason, row.stop_string


@pytest.mark.parametrize("place", range(8, 16))
def test_a_stop_string_within_a_block(watched, place):
    """The tokens of the zoo's tokenizer are bytes."""
    plain = watched.request("stopped", 9, 24, seed=5)
    answer = watched.alone(plain)
    stop = bytes(answer[place : place + 2]).decode(errors="replace")
    request = dataclasses.replace(plain, stop=(stop,))
    expected = ended(watched, request)
    assert ended(watched, request, Guesses({"stopped": answer})) == expected


@pytest.mark.parametrize("place", range(6, 14))
def test_the_end_of_the_sequence_within_a_block(watched, place, monkeypatch):
    request = dataclasses.replace(watched.request("ended", 9, 24, seed=6), ignore_eos=False)
    answer = watched.alone(request)
    monkeypatch.setattr(watched.engine._finish, "_end_tokens", frozenset({answer[place]}))
    expected = ended(watched, request)
    assert expected[1] == "stop"
    assert ended(watched, request, Guesses({"ended": answer})) == expected


def test_a_loop_ends_within_a_block(watched):
    biased = ((65, 100.0),)
    request = dataclasses.replace(
        watched.request("loop", 9, 40, logit_bias=biased), loops=Loops(min_tokens=1, max_tokens=2, count=11)
    )
    expected = ended(watched, request)
    assert expected[0] == [65] * 11
    assert ended(watched, request, Guesses({"loop": [65] * 40})) == expected


def test_a_thought_is_ended_within_a_block(watched):
    """What is forced takes the place of the draws, and of what was drafted there."""
    request = dataclasses.replace(
        watched.request("thought", 9, 40, seed=2),
        markup=Markup(think=("<think>", "</think>"), opening="<think>"),
        thinking=ThinkingBudget(10, tuple(b"</think>")),
    )
    expected = ended(watched, request)
    assert bytes(expected[0][10:18]) == b"</think>"
    guesses = Guesses({"thought": expected[0]})
    assert ended(watched, request, guesses) == expected
    assert guesses.num_accepted > 5


def test_logprobs(watched):
    request = dataclasses.replace(watched.request("told", 9, 24, seed=4, temperature=0.9), top_logprobs=3)
    events = []
    for drafts in (None, Guesses({"told": watched.alone(request)})):
        engine = watched.engine
        scheduler = Scheduler(engine.plan(), num_slots=1, memory=engine.memory, drafts=drafts)
        scheduler.add(engine.submit(request))
        told = []
        while scheduler.has_work:
            happened = engine.run(scheduler.tick())
            scheduler.settle(happened)
            told += [logprob for event in happened for logprob in getattr(event, "logprobs", ())]
        events.append(told)
    assert events[0] == events[1]


def test_a_row_that_is_cancelled_between_rounds(watched):
    requests = [watched.request(str(i), 8, 40, seed=i) for i in range(3)]
    alone = {request.id: watched.alone(request) for request in requests}

    def cancel(scheduler):
        watched.engine.prompts.check(scheduler.rows)
        for row in scheduler.rows:
            if row.request.id == "1" and len(row.output) > 12:
                scheduler.remove(row)
                watched.engine.cancel(row)

    _, rows = drive(watched.engine, requests, drafts=Guesses(alone), on_tick=cancel)
    assert rows[1].finish_reason == "cancelled"
    assert [rows[0].output, rows[2].output] == [alone["0"], alone["2"]]
    assert rows[1].output == alone["1"][: len(rows[1].output)]


def test_a_finish_step_that_fails_within_a_block(watched, monkeypatch):
    requests = [watched.request(str(i), 8, 30, seed=i) for i in range(2)]
    alone = {request.id: watched.alone(request) for request in requests}
    finish = watched.engine._finish.finish

    def failing(row, *arguments):
        if row.request.id == "1" and len(row.output) == 9:
            raise RuntimeError("no text")
        return finish(row, *arguments)

    monkeypatch.setattr(watched.engine._finish, "finish", failing)
    failed = []
    engine = watched.engine
    scheduler = Scheduler(engine.plan(), num_slots=2, memory=engine.memory, drafts=Guesses(alone))
    rows = [engine.submit(request) for request in requests]
    for row in rows:
        scheduler.add(row)
    while scheduler.has_work:
        events = engine.run(scheduler.tick())
        failed += [event.row for event in events if isinstance(event, Failed)]
        scheduler.settle(events)
        scheduler.check()
        engine.prompts.check(scheduler.rows)
    assert failed == [rows[1]]
    assert rows[0].output == alone["0"]


@pytest.mark.parametrize("arm", ARMS)
def test_memory_for_drafts_is_taken_from_nobody(arm):
    """At the edge of the budget rows go on with one token; they are preempted as often as without drafts."""
    budget = Bound(3 * opened(arm).engine.memory.row_bytes(40))
    watched = opened(arm, kv_cache_budget=budget)
    requests = [watched.request(str(i), 20, 19 + i, seed=i) for i in range(3)]
    assert_same(watched, requests, most=20)


@pytest.mark.parametrize("arm", ARMS)
def test_rows_that_draft_feed_and_use_the_prompt_cache(arm):
    """What was forgotten is in no block that others adopt."""
    watched = opened(arm, no_prompt_cache=False)
    first = watched.request("first", 20, 50, seed=1)
    answer = watched.alone(first)
    watched.engine.prompts.reset()
    assert drive(watched.engine, [first], drafts=Guesses({"first": answer}))[0] == [answer]
    again = dataclasses.replace(first, id="again", prompt=(*first.prompt, *answer, 5, 6), max_tokens=20)
    outputs, rows = drive(watched.engine, [again])
    assert rows[0].num_cached >= 64
    watched.engine.prompts.reset()
    assert outputs[0] == watched.alone(again)


@pytest.mark.parametrize("sampling", ["greedy", "looks back"])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_prompt_lookup(watched, num_rows, sampling):
    """Greedy answers of a tiny model go round in circles, which lookup knows."""
    requests = [watched.request(str(i), 30, 60, seed=i, **SAMPLINGS[sampling]) for i in range(num_rows)]
    alone = [watched.alone(request) for request in requests]
    drafts = lookup()
    assert drive(watched.engine, requests, drafts=drafts)[0] == alone
    assert sampling != "greedy" or drafts.counts.accepted > 0


@pytest.mark.real
@pytest.mark.parametrize("model", ["real_checkpoint", "real_base_checkpoint"])
def test_the_built_in_models(model, request):
    watched = Watched(request.getfixturevalue(model))
    engine = watched.engine
    text = "Repeat this: one two three four five six seven. one two three four five six seven. one two three"
    prompt = tuple(engine.language.tokens.encode(text, True))
    for sampling in (Sampling(seed=3), Sampling(temperature=0.7, seed=3)):
        asked = dataclasses.replace(watched.request("said", 1, 16), prompt=prompt, sampling=sampling)
        watched.logits.clear()
        expected = watched.alone(asked)
        logits = dict(watched.logits)
        watched.logits.clear()
        drafts = lookup()
        assert drive(engine, [asked], drafts=drafts)[0] == [expected]
        assert all(np.array_equal(watched.logits[key], logits[key]) for key in logits)
        assert drafts.counts.accepted > (0 if sampling.temperature else 3)
