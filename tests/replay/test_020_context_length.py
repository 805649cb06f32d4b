"""Case 20: the context length that was asked for is the one that is enforced, and the one that is told."""

from pathlib import Path

import pytest

from tests.serving import CHAT, COMPLETIONS, served

pytestmark = pytest.mark.anyio

CONTEXT = 64


def chat(num_extra: int) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x" * num_extra}]}


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_prompt_length_around_the_bound(tiny: Path, streamed: bool) -> None:
    async with served(tiny, ctx_size=CONTEXT) as service:
        await service.answer(CHAT, chat(0) | {"max_tokens": 1})
        overhead = len(service.engine.rows[0].request.prompt)
        for num_prompt in range(CONTEXT - 4, CONTEXT + 5):
            bodies = {
                CHAT: chat(num_prompt - overhead),
                COMPLETIONS: {"prompt": list(range(num_prompt))},
            }
            for path, body in bodies.items():
                response = await service.post(path, body | {"stream": streamed, "ignore_eos": True})
                if num_prompt < CONTEXT:
                    assert response.status_code == 200
                    assert len(service.engine.rows[-1].output) == CONTEXT - num_prompt
                    continue
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert f"{num_prompt} tokens" in error["message"]
                assert f"{CONTEXT}," in error["message"]
                assert error["param"] == ("messages" if path == CHAT else "prompt")


async def test_the_advertised_length_is_the_enforced_one(tiny: Path) -> None:
    for asked, enforced in ((CONTEXT, CONTEXT), (0, 4096)):
        async with served(tiny, ctx_size=asked) as service:
            await service.answer(COMPLETIONS, {"prompt": "hi", "max_tokens": 1})
            [described] = (await service.client.get("/v1/models")).json()["data"]
            assert described["max_model_len"] == described["meta"]["n_ctx"] == enforced
            assert (await service.client.get("/v1/models/tiny")).json() == described


async def test_the_context_ends_an_answer_that_nothing_else_ends(tiny: Path) -> None:
    async with served(tiny, ctx_size=CONTEXT) as service:
        body = {"prompt": list(range(10)), "ignore_eos": True}
        for bound in ({}, {"max_tokens": 1000}):
            answered = await service.answer(COMPLETIONS, body | bound)
            assert answered["choices"][0]["finish_reason"] == "length"
            assert answered["usage"]["total_tokens"] == CONTEXT
