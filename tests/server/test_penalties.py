"""Penalties and bias over HTTP: they act on their own request, and their ids and bounds are checked."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.serving import COMPLETIONS, served
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.anyio

BODY = {"prompt": "hello", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repeat_penalty": 1.5, "repeat_last_n": 4},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repeat_last_n": -1},
    {"logit_bias": {"7": 100}},
]


async def test_each_acts_and_a_batch_changes_nothing(tiny: Path) -> None:
    async with served(tiny, parallel=5) as service:

        async def tokens(*bodies: dict[str, Any]) -> list[tuple[int, ...]]:
            before = len(service.engine.rows)
            await asyncio.gather(*(service.answer(COMPLETIONS, body) for body in bodies))
            return [tuple(row.output) for row in service.engine.rows[before:]]

        [plain] = await tokens(BODY)
        alone = [(await tokens(BODY | asked))[0] for asked in ASKED]
        assert plain not in alone
        assert alone[3] == (7,) * 24
        assert set(await tokens(BODY, *(BODY | asked for asked in ASKED))) == {plain, *alone}


async def test_lookahead_changes_nothing(tiny: Path) -> None:
    texts = []
    for lookahead in (False, True):
        async with served(tiny, lookahead=lookahead) as service:
            answers = await asyncio.gather(*(service.answer(COMPLETIONS, BODY | asked) for asked in ASKED))
            texts.append([answer["choices"][0]["text"] for answer in answers])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"repetition_penalty": 1.2, "repeat_penalty": 1.3}, "repeat_penalty"),
    ],
    ids=str,
)
async def test_what_cannot_act_is_refused_by_name(tiny: Path, asked: dict[str, Any], param: str) -> None:
    async with served(tiny) as service:
        answer = await service.post(COMPLETIONS, BODY | asked)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(param.removesuffix("[...]"))
