"""Case 82: a failed forward fails its own rows with a 500; a run of failures ends the loop and the process."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.loop import MAX_FAULTS_IN_A_ROW
from engine.plan import PrefillPlan
from tests.serving import COMPLETIONS, PATIENCE_S, ScriptedSampler, WatchedEngine, live, served

pytestmark = pytest.mark.anyio

POISON = 250


class Poisoned(WatchedEngine):
    """An engine whose forward raises when a certain token is among what it runs."""

    def _submit(self, pieces: Any, rows: Any, *more: Any, **named: Any) -> Any:
        prompts = [piece.row.request.prompt[piece.start : piece.stop] for piece in pieces]
        if any(POISON in prompt for prompt in prompts):
            raise RuntimeError("a bad number")
        return super()._submit(pieces, rows, *more, **named)


class Dying(WatchedEngine):
    """An engine whose loop breaks outside of any step."""

    def plan(self) -> PrefillPlan:
        plan = super().plan()

        def broken(num_tokens: int, seconds: float) -> None:
            raise KeyError("a fault of ours")

        plan.measured = broken
        return plan


def body(*prompt: int) -> dict[str, Any]:
    return {"prompt": list(prompt), "temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.mark.parametrize("lookahead", [False, True])
async def test_only_the_rows_of_the_step_fail(tiny: Path, lookahead: bool) -> None:
    engines: list[Poisoned] = []

    def open_engine(config: EngineConfig) -> Poisoned:
        engines.append(Poisoned(config))
        return engines[0]

    async with served(tiny, open_engine=open_engine, prefill_chunk_size=4, lookahead=lookahead) as service:
        alone = await service.answer(COMPLETIONS, body(1, 2, 3))
        gate = engines[0].gate
        for streamed in (True, False):
            gate.shut()
            bystander = asyncio.ensure_future(service.answer(COMPLETIONS, body(1, 2, 3)))
            await gate.engine_held()
            gate.let(3)
            await gate.engine_held()
            victim = asyncio.ensure_future(
                service.post(COMPLETIONS, body(1, 2, 3, 4, 5, POISON) | {"stream": streamed})
            )
            gate.open()
            response = await victim
            if streamed:
                assert json.loads(response.text.split("data: ")[-1])["error"]["code"] == "step_failed"
            else:
                assert response.status_code == 500
                assert "a bad number" in response.json()["error"]["message"]
            assert (await bystander)["choices"] == alone["choices"]
        assert (await service.answer(COMPLETIONS, body(1, 2, 3)))["choices"] == alone["choices"]
        assert (await service.client.get("/health")).status_code == 200


@pytest.mark.parametrize("lookahead", [False, True])
async def test_a_token_that_cannot_become_text_fails_its_row_alone(tiny: Path, lookahead: bool) -> None:
    script = [1, 2, 3]

    class Mute(WatchedEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config, sampler=ScriptedSampler({0: [*script, POISON, *script], 1: script * 3}))
            decode = self._finish._decode

            def refusing(ids: Sequence[int]) -> str:
                assert POISON not in ids, "a bad token"
                return decode(ids)

            self._finish._decode = refusing

    async with served(tiny, open_engine=Mute, lookahead=lookahead) as service:
        for _ in range(3):
            alone = await service.answer(COMPLETIONS, body(1) | {"seed": 1, "max_tokens": 9})
            bad, good = await asyncio.gather(
                service.post(COMPLETIONS, body(1) | {"seed": 0}),
                service.answer(COMPLETIONS, body(1) | {"seed": 1, "max_tokens": 9}),
            )
            assert bad.status_code == 500
            assert good["choices"] == alone["choices"]


async def test_failures_with_a_success_between_them_end_nothing(tiny: Path) -> None:
    async with served(tiny, open_engine=Poisoned) as service:
        for _ in range(MAX_FAULTS_IN_A_ROW + 1):
            for _ in range(MAX_FAULTS_IN_A_ROW - 1):
                assert (await service.post(COMPLETIONS, body(POISON))).status_code == 500
            await service.answer(COMPLETIONS, body(1))


async def test_a_run_of_failures_ends_the_loop(tiny: Path) -> None:
    gone = asyncio.Event()
    async with served(tiny, open_engine=Poisoned, on_fault=lambda fault: gone.set()) as service:
        for _ in range(MAX_FAULTS_IN_A_ROW):
            assert (await service.post(COMPLETIONS, body(POISON))).status_code == 500
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
        for response in (await service.client.get("/health"), await service.post(COMPLETIONS, body(1))):
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert "a bad number" in response.json()["error"]["message"]


async def test_those_who_wait_hear_of_the_end(tiny: Path) -> None:
    async with served(tiny, open_engine=Poisoned, parallel=1) as service:
        asked = [service.post(COMPLETIONS, body(POISON)) for _ in range(MAX_FAULTS_IN_A_ROW + 4)]
        statuses = sorted([response.status_code for response in await asyncio.gather(*asked)])
        assert statuses == [500] * MAX_FAULTS_IN_A_ROW + [503] * 4


async def test_a_loop_that_breaks_in_itself_says_so(tiny: Path) -> None:
    gone = asyncio.Event()
    async with served(tiny, open_engine=Dying, on_fault=lambda fault: gone.set()) as service:
        response = await asyncio.wait_for(service.post(COMPLETIONS, body(1)), PATIENCE_S)
        assert response.status_code == 503
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
        assert (await service.client.get("/health")).status_code == 503


def test_the_process_exits_non_zero(tiny: Path) -> None:
    with live(tiny, open_engine=Poisoned) as server, server.client() as client:
        for _ in range(MAX_FAULTS_IN_A_ROW):
            assert client.post(COMPLETIONS, json=body(POISON)).status_code == 500
        assert server.ended() == 1
