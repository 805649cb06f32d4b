"""Case 87: a sliding-window model answers a short request after a long one as it would have at first."""

from pathlib import Path

import pytest

from tests.serving import COMPLETIONS, served
from tests.zoo import write_zoo

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "recurrent_gemma"])
@pytest.mark.parametrize("no_batch", [False, True])
async def test_the_second_request_is_as_the_first(tmp_path: Path, family: str, no_batch: bool) -> None:
    checkpoint = write_zoo(tmp_path / family, family)
    short, long = (
        {"prompt": "x" * length, "max_tokens": 20, "temperature": 0, "ignore_eos": True} for length in (7, 256)
    )
    async with served(checkpoint, no_batch=no_batch) as service:
        first = await service.answer(COMPLETIONS, short)
    async with served(checkpoint, no_batch=no_batch) as service:
        await service.answer(COMPLETIONS, long)
        second = await service.answer(COMPLETIONS, short)
    assert second["usage"]["prompt_tokens"] == 7
    assert second["choices"] == first["choices"]
