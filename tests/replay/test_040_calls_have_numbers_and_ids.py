"""Case 40: two calls of one function have indexes 0 and 1, ids of their own, and each name once."""

from pathlib import Path

import pytest

from tests.replies import CALL, TOOLS, script
from tests.serving import CHAT, served
from tests.templates import PLAIN, checkpoint

pytestmark = pytest.mark.anyio


async def test_two_calls_of_the_same_function(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(f"{CALL}\n{CALL}")) as service:
        stream = await service.stream(CHAT, TOOLS)
    calls = [call for entry in stream.entries() for call in entry["delta"].get("tool_calls", ())]
    named = [call for call in calls if "name" in call["function"]]
    assert [call["index"] for call in named] == [0, 1]
    assert len({call["id"] for call in named}) == 2
    assert {call["index"] for call in calls} == {0, 1}
    assert all("id" not in call for call in calls if call not in named)
