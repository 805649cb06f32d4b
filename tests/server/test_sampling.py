"""The whole sampler chain over HTTP: every field acts on its own request alone, and is checked by name."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.engines import BACKENDS
from tests.serving import CHAT, COMPLETIONS, ScriptedSampler, Served, served, tokens_of

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {
    "prompt": "hello hello",
    "max_tokens": 40,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 3,
}
ACT: list[dict[str, Any]] = [
    {"typical_p": 0.2},
    {"top_n_sigma": 0.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"top_p": 0.0, "min_keep": 30},
    {"dynatemp_range": 1.0},
    {"dynatemp_range": 1.0, "dynatemp_exponent": 4.0},
    {"mirostat": 1, "mirostat_tau": 4.0},
    {"mirostat": 2, "mirostat_tau": 4.0},
    {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.9},
]
# A repetitive answer is what DRY acts on: greedy, with a bias that keeps to two letters.
DULL = BODY | {"temperature": 0, "logit_bias": {str(token): 60 for token in tokens_of("ab")}}
DRY: list[dict[str, Any]] = [
    {"dry_multiplier": 50.0},
    {"dry_multiplier": 50.0, "dry_base": 1.0},
    {"dry_multiplier": 50.0, "dry_allowed_length": 6},
    {"dry_multiplier": 50.0, "dry_penalty_last_n": 8},
    {"dry_multiplier": 50.0, "dry_sequence_breakers": ["a", "b"]},
]


async def outputs(service: Served, *bodies: dict[str, Any]) -> list[tuple[int, ...]]:
    """The tokens of each body's answer, the bodies sent at once."""
    before = len(service.engine.rows)
    await asyncio.gather(*(service.answer(COMPLETIONS, body) for body in bodies))
    return [tuple(row.output) for row in service.engine.rows[before:]]


async def test_every_field_acts_and_a_batch_changes_nothing(tiny: Path) -> None:
    bodies = [BODY | asked for asked in ({}, *ACT)] + [DULL | asked for asked in ({}, *DRY)]
    async with served(tiny, parallel=len(bodies)) as service:
        alone = [(await outputs(service, body))[0] for body in bodies]
        assert sorted(await outputs(service, *bodies)) == sorted(alone)
        with_narrow = await outputs(service, BODY | ACT[6] | {"top_k": 1, "min_p": 0.9, "typical_p": 0.1})
        assert with_narrow == [alone[7]], "mirostat takes the place of truncations"
    assert len(set(alone[: 1 + len(ACT)])) == 1 + len(ACT)
    dull, hard, flat, late, short, broken = alone[1 + len(ACT) :]
    assert set(dull) <= set(tokens_of("ab"))
    assert dull not in (hard, flat, late, short)
    assert len({hard, late, short}) == 3
    assert broken == dull, "every token breaks a sequence, so there is no repetition"


async def test_neither_lookahead_nor_preemption_changes_anything(tiny: Path) -> None:
    bodies = [BODY | asked for asked in (ACT[7], ACT[2])] + [DULL | DRY[0], DULL]
    seen = []
    for options in ({"lookahead": False}, {"lookahead": True}, {"ctx_size": 110, "kv_unified": True}):
        async with served(tiny, parallel=4, **options) as service:
            seen.append(await outputs(service, *bodies))
            preempted = sum(row.num_preempted for row in service.engine.rows)
            assert bool(preempted) == ("ctx_size" in options)
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(seen[2])


async def test_choices_draw_apart_and_each_as_it_does_alone(tiny: Path) -> None:
    async with served(tiny) as service:
        three = await outputs(service, BODY | {"n": 3, "best_of": 3})
        [one] = await outputs(service, BODY)
        assert three[0] == one
        assert len(set(three)) == 3
        assert await outputs(service, BODY | {"n": 3}) == three


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompts", [1, 2])
async def test_choices_compute_their_prompt_about_once(tiny: Path, prompts: int, backend: str) -> None:
    """What is not shared is the last part of a block, which each choice computes for its first token."""
    text = "a long text that is about something, " * 5
    body = BODY | {"prompt": [text, text[::-1]][:prompts], "n": 4, "max_tokens": 4}
    async with served(tiny, parallel=8, prefill_chunk_size=64, decode_storage_backend=backend) as service:
        answer = await service.answer(COMPLETIONS, body)
        computed = sum(tick.prefill_tokens for tick in service.engine.ticks)
    length = len(tokens_of(text))
    assert prompts * length <= computed < prompts * (length + 4 * 16)
    assert answer["usage"]["prompt_tokens"] == prompts * length


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"typical_p": 0}, "typical_p"),
        ({"typical_p": 1.1}, "typical_p"),
        ({"top_n_sigma": -2}, "top_n_sigma"),
        ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"xtc_threshold": 0.9}, "xtc_threshold"),
        ({"min_keep": -1}, "min_keep"),
        ({"dry_multiplier": -1}, "dry_multiplier"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_allowed_length": -1}, "dry_allowed_length"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[...]"),
        ({"dry_sequence_breakers": ["x" * 41]}, "dry_sequence_breakers[...]"),
        ({"dry_sequence_breakers": ["x"] * 17}, "dry_sequence_breakers"),
        ({"dynatemp_range": -1}, "dynatemp_range"),
        ({"dynatemp_exponent": -0.5}, "dynatemp_exponent"),
        ({"mirostat": 3}, "mirostat"),
        ({"mirostat_tau": "warm"}, "mirostat_tau"),
        ({"mirostat_eta": 2}, "mirostat_eta"),
        ({"max_pattern_size": 1000}, "max_pattern_size"),
        ({"max_pattern_size": 3, "min_pattern_size": 4}, "min_pattern_size"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count"),
        ({"min_count": 3}, "min_count"),
    ],
    ids=str,
)
async def test_what_cannot_act_is_refused_by_name(
    tiny: Path, path: str, asked: dict[str, Any], param: str
) -> None:
    body = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    async with served(tiny) as service:
        answer = await service.post(path, body | {"max_tokens": 2} | asked)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(param.removesuffix("[...]"))


async def test_null_is_not_given(tiny: Path) -> None:
    nothing = dict.fromkeys(name for asked in (*ACT, *DRY) for name in asked)
    nothing |= dict.fromkeys(("logprobs", "max_pattern_size", "min_pattern_size", "min_count", "best_of"))
    async with served(tiny) as service:
        assert await outputs(service, BODY) == await outputs(service, {**nothing, **BODY})


async def test_best_of_gives_every_choice_back_or_is_refused(tiny: Path) -> None:
    async with served(tiny) as service:
        refused = await service.post(COMPLETIONS, BODY | {"n": 2, "best_of": 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize(
    ("asked", "configured", "expected"),
    [
        ({}, "off", None),
        ({"max_pattern_size": 4, "min_count": 3}, "off", "xabab"),
        ({"max_pattern_size": 1, "min_count": 3}, "off", None),
        ({"max_pattern_size": 4}, "off", "xabababababab"),
        ({}, "1,8,4", "xabababab"),
        ({"min_count": 2}, "1,8,4", "xabab"[:5]),
        ({"max_pattern_size": 0}, "1,8,4", None),
    ],
    ids=str,
)
async def test_an_answer_that_goes_round_in_circles_ends(
    tiny: Path, asked: dict[str, Any], configured: str, expected: str | None
) -> None:
    text = "x" + "ab" * 15
    sampler = ScriptedSampler({3: tokens_of(text)})
    async with served(tiny, sampler=sampler, loop_detection=configured) as service:
        body = BODY | {"max_tokens": len(text)} | asked
        [choice] = (await service.answer(COMPLETIONS, body))["choices"]
        stream = await service.stream(COMPLETIONS, body)
    count = body.get("min_count") or (4 if configured != "off" else 12)
    looped = "x" + "ab" * count
    assert choice["text"] == stream.text() == (text if expected is None else looped)
    assert [choice["finish_reason"]] == stream.reasons() == ["length" if expected is None else "stop"]
