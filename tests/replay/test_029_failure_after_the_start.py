"""Case 29: a stream that fails after its start ends with an error frame and without the success marker."""

from pathlib import Path

import pytest

from tests.serving import CHAT, COMPLETIONS, ScriptedSampler, served, tokens_of

pytestmark = pytest.mark.anyio

BODIES = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "hi"}}


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_frame_ends_the_stream(tiny: Path, path: str) -> None:
    scripts = {n: [*tokens_of("abcdef")[:n], ValueError("no more")] for n in range(6)}
    scripts[99] = tokens_of("well")
    async with served(tiny, sampler=ScriptedSampler(scripts)) as service:
        for num_tokens in range(6):
            stream = await service.stream(path, BODIES[path] | {"seed": num_tokens})
            assert stream.status == 200
            assert not stream.done
            assert stream.text() == "abcdef"[:num_tokens]
            assert stream.reasons() == []
            [error] = stream.errors
            assert stream.chunks[-1] == {"error": error}
            assert (error["type"], error["code"]) == ("server_error", "step_failed")
            assert "no more" in error["message"]
            response = await service.post(path, BODIES[path] | {"seed": num_tokens})
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "step_failed"
            after = await service.stream(path, BODIES[path] | {"seed": 99})
            assert (after.text(), after.done) == ("well", True)
