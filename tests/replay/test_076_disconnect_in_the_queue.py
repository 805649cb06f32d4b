"""Case 76: a queued request whose client has left is never run, whichever of the queue leave."""

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.serving import COMPLETIONS, served, settle

pytestmark = pytest.mark.anyio

WAITING = ("second", "third", "fourth")
LEAVING = [names for n in range(1, 4) for names in itertools.combinations(WAITING, n)]


def body(name: str) -> dict[str, object]:
    return {"prompt": name, "temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("admitted", [True, False], ids=["admitted", "in the mail"])
async def test_those_who_left_never_run(tiny: Path, admitted: bool, streamed: bool) -> None:
    async with served(tiny, parallel=1) as service:
        for leaving in LEAVING:
            service.engine.rows.clear()
            service.gate.shut()
            clients = {}
            for number, name in enumerate(("first", *WAITING), 1):
                posted = service.post(COMPLETIONS, body(name) | {"stream": streamed})
                clients[name] = asyncio.ensure_future(posted)
                await service.submitted(number)
                await service.gate.engine_held()
            if admitted:
                service.gate.let(1)
                await service.gate.engine_held()
                assert len(service.engine.rows) == 4
            for name in leaving:
                clients[name].cancel()
            await asyncio.wait([clients[name] for name in leaving])
            await service.exchanges_ended(but=len(clients) - len(leaving))
            service.gate.open()
            for name in {*clients} - {*leaving}:
                assert (await clients[name]).status_code == 200
            await asyncio.to_thread(settle, service.loop)
            for row in service.engine.rows:
                name = service.engine.language.tokens.decode(row.request.prompt)
                assert service.engine.ran(row) == (name not in leaving)
                assert (row.started_s == 0.0) == (name in leaving)
