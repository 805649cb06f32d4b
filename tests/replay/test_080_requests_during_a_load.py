"""Case 80: requests that come while their model is being loaded wait for it, whenever they come; one whose client
leaves meanwhile is gone, and the others are answered.
"""

import asyncio
from pathlib import Path

import pytest

from tests.several import Loads, alone, held, several, text, wishing, write_several

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("models_max", [1, 2])
async def test_all_but_the_one_that_left_are_answered(tmp_path: Path, models_max: int) -> None:
    folders = write_several(tmp_path)
    expected, loads = await alone(folders), Loads()
    async with several(folders, loads, models_max=models_max) as service:
        assert await text(service, "tiny") == expected["tiny"]
        with held(loads):
            asked = [asyncio.ensure_future(text(service, "window"))]
            await loads.has_begun()
            for number in (2, 3):
                asked.append(asyncio.ensure_future(text(service, "window")))
                await wishing(service, number)
            asked[1].cancel()
            await wishing(service, 2)
        for one in (asked[0], asked[2]):
            assert await one == expected["window"]
        assert asked[1].cancelled()
        assert loads.opened == ["tiny", "window"]
        assert await text(service, "tiny") == expected["tiny"]


async def test_a_load_that_everybody_has_left_keeps_nobody_waiting(tmp_path: Path) -> None:
    folders = write_several(tmp_path)
    expected, loads = await alone(folders), Loads()
    async with several(folders, loads, models_max=1) as service:
        with held(loads):
            left = asyncio.ensure_future(text(service, "window"))
            await loads.has_begun()
            waits = asyncio.ensure_future(text(service, "hybrid"))
            await wishing(service, 2)
            left.cancel()
            await wishing(service, 1)
        assert await waits == expected["hybrid"]
