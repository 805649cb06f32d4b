"""Case 105: the thread that loads the model is the one that steps it, and it is no thread of the server."""

import asyncio
import threading
from pathlib import Path

import pytest

from tests.serving import CHAT, COMPLETIONS, served

pytestmark = pytest.mark.anyio


async def test_load_and_steps_share_their_thread(tiny: Path) -> None:
    async with served(tiny) as service:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        asked = [service.stream(CHAT, chat) for _ in range(6)]
        asked += [service.stream(COMPLETIONS, {"prompt": "hi", "max_tokens": 5}) for _ in range(6)]
        assert all(stream.done for stream in await asyncio.gather(*asked))
        assert service.engine.ran_on == {service.engine.loaded_on}
        assert service.engine.loaded_on != threading.get_ident()
