"""The prompt cache as clients see it: what is counted, kept apart, explained and dropped."""

import asyncio

import pytest

from engine.errors import EngineStopped
from engine.size import Size
from tests.serving import CHAT, COMPLETIONS, served, tokens_of
from tests.zoo import write_zoo

pytestmark = pytest.mark.anyio

TEXT = "A text of several blocks, which is asked for again and again. "
BODY = {"prompt": TEXT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
WHOLE = (len(TEXT) - 1) // 16 * 16


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def conversation(*turns, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": messages, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **more}


async def test_counts(tiny):
    async with served(tiny, portable=True) as service:
        cold, warm = [await service.answer(COMPLETIONS, BODY) for _ in range(2)]
        assert cold["choices"] == warm["choices"]
        assert cold["usage"]["prompt_tokens"] == warm["usage"]["prompt_tokens"] == len(TEXT)
        assert (cached(cold), cached(warm)) == (0, WHOLE)
        assert (cold["timings"]["prompt_n"], cold["timings"]["cache_n"]) == (len(TEXT), 0)
        assert (warm["timings"]["prompt_n"], warm["timings"]["cache_n"]) == (len(TEXT) - WHOLE, WHOLE)
        stream = await service.stream(COMPLETIONS, BODY | {"stream_options": {"include_usage": True}})
        assert cached(stream.chunks[-1]) == stream.chunks[-1]["timings"]["cache_n"] == WHOLE


async def test_the_metrics_say_the_same(tiny):
    async with served(tiny, portable=True) as service:
        for _ in range(3):
            await service.answer(COMPLETIONS, BODY)
        stats = (await service.client.get("/v1/cache/stats")).json()
        text = (await service.client.get("/metrics")).text
        for name, number in {
            "prompt_tokens_total": len(TEXT) + 2 * (len(TEXT) - WHOLE),
            "prompt_tokens_cached_total": 2 * WHOLE,
            "prefix_cache_hits_total": 2,
            "prefix_cache_misses_total": 1,
            "prefix_cache_tokens_reused_total": 2 * WHOLE,
            "prefix_cache_evictions_total": 0,
            "prefix_cache_bytes": stats["num_bytes"],
        }.items():
            assert f"mlxcel_{name} {float(number)}\n" in text


async def test_hits_that_were_computed_again_are_counted(tiny):
    async with served(tiny, portable=True, verify_cache=1.0) as service:
        for _ in range(2):
            await service.answer(COMPLETIONS, BODY)
        for _ in range(3):  # one piece is computed after each answer of the engine
            stats = (await service.client.get("/v1/cache/stats")).json()
        assert (stats["verify_checked"], stats["verify_different"], stats["off_plan"]) == (1, 0, 0)
        text = (await service.client.get("/metrics")).text
        assert "mlxcel_prefix_cache_verify_checked_total 1.0\n" in text
        assert "mlxcel_prefix_cache_verify_different_total 0.0\n" in text


async def test_choices_share_their_prompt_and_it_is_counted_once(tiny):
    async with served(tiny, portable=True, prefill_chunk_size=16) as service:
        answer = await service.answer(COMPLETIONS, BODY | {"n": 4})
        assert answer["usage"]["prompt_tokens"] == len(TEXT)
        assert cached(answer) == 0
        assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == 4 * len(TEXT)
        assert answer["timings"]["cache_n"] > 0
        again = await service.answer(COMPLETIONS, BODY | {"n": 4})
        assert cached(again) == len(TEXT) - 4 * (len(TEXT) - WHOLE)
        assert again["choices"] == answer["choices"]


async def test_cache_prompt_false_neither_takes_nor_gives(tiny):
    async with served(tiny, portable=True) as service:
        for body in (BODY | {"cache_prompt": False}, BODY, BODY | {"cache_prompt": False}):
            assert cached(await service.answer(COMPLETIONS, body)) == 0
        assert cached(await service.answer(COMPLETIONS, BODY | {"cache_prompt": None})) == WHOLE


async def test_salts_keep_clients_apart(tiny):
    async with served(tiny, portable=True) as service:
        for salt in ("a", "b", ""):
            body = BODY | {"cache_salt": salt}
            assert [cached(await service.answer(COMPLETIONS, body)) for _ in range(2)] == [0, WHOLE]
        assert cached(await service.answer(COMPLETIONS, BODY | {"prompt_cache_key": "anything"})) == WHOLE


@pytest.mark.parametrize("key", ["", "mine"])
async def test_what_a_request_with_a_key_has_used_is_kept_for_longer(tiny, key):
    async with served(tiny, portable=True, prompt_cache_bytes=Size("60kB")) as service:
        await service.answer(COMPLETIONS, BODY | {"prompt_cache_key": key})
        for other in range(6):
            await service.answer(COMPLETIONS, BODY | {"prompt": f"{other}{TEXT}"})
        assert service.engine.prompts.stats().evictions > 0
        assert (cached(await service.answer(COMPLETIONS, BODY)) == WHOLE) == bool(key)


@pytest.mark.parametrize("field", [{"cache_salt": 7}, {"cache_prompt": "yes"}, {"prompt_cache_key": "k" * 2000}])
async def test_wrong_kinds_are_refused_by_name(tiny, field):
    async with served(tiny, portable=True) as service:
        response = await service.post(COMPLETIONS, BODY | field)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == next(iter(field))


async def test_a_miss_is_explained(tiny):
    async with served(tiny, portable=True) as service:
        first = await service.answer(CHAT, conversation("the first message", "an answer", "and the third one"))
        assert first["timings"]["cache_miss"] is None
        changed = await service.answer(CHAT, conversation("the first message", "another answer", "and the third"))
        miss = changed["timings"]["cache_miss"]
        assert miss["message_index"] == 1
        prompts = [row.request.prompt for row in service.engine.rows]
        assert prompts[0][: miss["token_index"]] == prompts[1][: miss["token_index"]]
        assert prompts[0][miss["token_index"]] != prompts[1][miss["token_index"]]
        assert cached(changed) == miss["token_index"] // 16 * 16
        again = await service.answer(CHAT, conversation("the first message", "another answer", "and the third"))
        assert again["timings"]["cache_miss"] is None
        raw = await service.answer(COMPLETIONS, {**BODY, "prompt": list(prompts[0][:20]) + [1] * 20})
        assert raw["timings"]["cache_miss"] == {"token_index": 20, "message_index": None}


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
async def test_a_miss_of_what_is_kept_whole_is_explained_too(tmp_path, family):
    async with served(write_zoo(tmp_path, family)) as service:
        turns = ("the first message", "an answer", "and the third one")
        first = await service.answer(CHAT, conversation(*turns))
        assert first["timings"]["cache_miss"] is None
        longer = await service.answer(CHAT, conversation(*turns, "so", "on"))
        assert longer["timings"]["cache_miss"] is None
        changed = await service.answer(CHAT, conversation("the first message", "another answer", "and the third"))
        miss = changed["timings"]["cache_miss"]
        assert miss["message_index"] == 1
        prompts = [row.request.prompt for row in service.engine.rows]
        assert prompts[1][: miss["token_index"]] == prompts[2][: miss["token_index"]]
        assert prompts[1][miss["token_index"]] != prompts[2][miss["token_index"]]


async def test_stats_and_reset(tiny):
    async with served(tiny, portable=True) as service:
        await service.answer(COMPLETIONS, BODY)
        await service.answer(COMPLETIONS, BODY)
        stats = (await service.client.get("/v1/cache/stats")).json()
        assert stats["enabled"]
        assert (stats["hits"], stats["misses"], stats["tokens_reused"]) == (1, 1, WHOLE)
        assert 0 < stats["num_bytes"] <= stats["budget_bytes"] == 2 << 30
        assert stats["num_blocks"] == (len(TEXT) + 2) // stats["block_tokens"]
        reset = (await service.post("/v1/cache/reset", {})).json()
        assert reset == {"freed_bytes": stats["num_bytes"]}
        after = (await service.client.get("/v1/cache/stats")).json()
        assert (after["num_bytes"], after["num_blocks"], after["tokens_reused"]) == (0, 0, WHOLE)
        assert cached(await service.answer(COMPLETIONS, BODY)) == 0


async def test_they_are_answered_while_rows_run(tiny):
    async with served(tiny, portable=True) as service:
        service.gate.shut()
        running = asyncio.ensure_future(service.answer(COMPLETIONS, BODY | {"max_tokens": 20}))
        await service.gate.engine_held()
        asked = [asyncio.ensure_future(service.client.get("/v1/cache/stats")) for _ in range(3)]
        service.gate.open()
        for answer in asked:
            assert (await answer).status_code == 200
        await running


async def test_an_engine_that_is_gone_says_so(tiny):
    def refuse(config):
        raise EngineStopped("made to fail")

    async with served(tiny, portable=True, open_engine=refuse) as service:
        response = await service.client.get("/v1/cache/stats")
        assert response.status_code == 503


async def test_switched_off(tiny):
    async with served(tiny, portable=True, no_prompt_cache=True) as service:
        assert [cached(await service.answer(COMPLETIONS, BODY)) for _ in range(2)] == [0, 0]
        stats = (await service.client.get("/v1/cache/stats")).json()
        assert not stats["enabled"]
        assert stats["num_blocks"] == 0


async def test_a_budget_too_small_for_a_block_keeps_nothing(tiny):
    async with served(tiny, portable=True, prompt_cache_bytes=Size("1KB")) as service:
        assert [cached(await service.answer(COMPLETIONS, BODY)) for _ in range(2)] == [0, 0]


async def test_the_answer_is_kept_for_the_next_turn(tiny):
    async with served(tiny, portable=True) as service:
        first = await service.answer(CHAT, conversation("a question", max_tokens=40))
        row = service.engine.rows[0]
        stored = len(row.request.prompt) + len(row.output) - 1
        following = [*row.request.prompt, *row.output, *tokens_of("and more")]
        second = await service.answer(COMPLETIONS, {**BODY, "prompt": following})
        assert cached(second) == stored // 16 * 16 > first["usage"]["prompt_tokens"]
