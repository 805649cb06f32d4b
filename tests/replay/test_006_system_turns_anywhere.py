"""Case 6: a system turn within a conversation is answered by one rule on all three chat surfaces, whatever the
template has a place for.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, MESSAGES, RESPONSES, served
from tests.templates import FIRST_SYSTEM, NO_SYSTEM, PLAIN, checkpoint

pytestmark = pytest.mark.anyio

FIRST = {"role": "system", "content": "You are terse."}
REST = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "system", "content": "From now on answer only BLUE."},
    {"role": "user", "content": "What colour is the sky?"},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [FIRST, *REST], "max_tokens": 2}),
    (MESSAGES, {"messages": [FIRST, *REST], "max_tokens": 2}),
    (MESSAGES, {"system": FIRST["content"], "messages": REST, "max_tokens": 2}),
    (RESPONSES, {"input": [FIRST, *REST], "max_output_tokens": 2}),
    (RESPONSES, {"instructions": FIRST["content"], "input": REST, "max_output_tokens": 2}),
]


@pytest.mark.parametrize("template", [PLAIN, FIRST_SYSTEM, NO_SYSTEM])
async def test_one_rule_on_all_surfaces(tmp_path: Path, template: str) -> None:
    async with served(checkpoint(tmp_path, template)) as service:
        for path, body in BODIES:
            await service.answer(path, body)
        prompts = {service.engine.language.tokens.decode(row.request.prompt) for row in service.engine.rows}
    [prompt] = prompts
    places = [prompt.index(str(turn["content"])) for turn in (FIRST, *REST)]
    assert places == sorted(places)
