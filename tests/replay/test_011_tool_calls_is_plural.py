"""Case 11: an answer that calls a tool ends with `tool_calls`, in both modes; one that was cut does not."""

from pathlib import Path

import pytest

from tests.replies import CALL, TOOLS, answered, script
from tests.serving import served
from tests.templates import PLAIN, checkpoint

pytestmark = pytest.mark.anyio


async def test_the_reason_of_a_call(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(CALL, CALL + "and", "no call")) as service:
        reasons = [
            (await answered(service, TOOLS | fields))["finish_reason"]
            for fields in ({"seed": 0}, {"seed": 1, "max_tokens": len(CALL) + 1}, {"seed": 2})
        ]
    assert reasons == ["tool_calls", "length", "stop"]
