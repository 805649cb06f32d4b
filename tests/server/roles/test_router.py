"""What a router does with its nodes: who runs what, who hears of a cancel, and what a node that goes leaves."""

import asyncio
from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest

from engine.request import TokenLogprob
from server.openapi import OPERATIONS, ROUTER_OPERATIONS
from server.roles import wire
from server.roles.peer import NodeLost
from tests.server.roles.parts import Parts, parts, until
from tests.serving import CHAT, COMPLETIONS, Gate

pytestmark = pytest.mark.anyio
BODY: dict[str, Any] = {
    "prompt": "a question of some length",
    "max_tokens": 30,
    "temperature": 0,
    "ignore_eos": True,
}


async def answer(one: Parts, **more: Any) -> str:
    response = await one.post(COMPLETIONS, {**BODY, **more})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def rows(pool: Any) -> list[Any]:
    return [row for service in pool for engine in service.engines for row in engine.rows]


async def freed(one: Parts) -> None:
    """No node has a row, nor a job of a router's."""
    for service in (*one.prefill, *one.decode):
        await until(lambda service=service: not service.loop._num_live, "no live row")
        await until(lambda service=service: not one.worker(service)._jobs, "no job")


async def test_the_prompt_is_computed_here_and_the_answer_there(tiny: Path) -> None:
    async with parts(tiny) as one:
        expected = await answer(one)
        assert await answer(one) == expected
        assert [len(row.output) for row in rows(one.prefill)] == [1, 1]
        assert [len(row.output) for row in rows(one.decode)] == [30, 30]
        assert one.worker(one.decode[0]).counts.states == {"fetched": 2}
        await freed(one)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_nodes_of_one_pool_do_it_all_where_there_is_no_other(tiny: Path, pool: str) -> None:
    async with parts(tiny) as both:
        expected = await answer(both)
    async with parts(tiny, prefill=2 * (pool == "prefill"), decode=2 * (pool == "decode")) as one:
        assert await answer(one) == expected
        await freed(one)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_cancel_reaches_the_node_that_works(tiny: Path, role: str) -> None:
    """Replay 79: a client that is gone stops the work wherever it is, within a second."""
    gate = Gate()
    async with parts(tiny, gates={role: gate}) as one:
        gate.shut()
        pool = getattr(one, role)
        asking = asyncio.create_task(one.post(COMPLETIONS, {**BODY, "max_tokens": 2000}))
        await until(lambda: pool[0].loop._num_live, "the node has the request")
        asking.cancel()
        clock = asyncio.get_running_loop().time
        since_s = clock()
        await until(lambda: not one.worker(pool[0])._jobs, "the node hears of it")
        assert clock() - since_s < 1
        gate.open()
        await freed(one)
        assert one.router.numbers().requests["cancelled"] == 1


async def test_priorities_reach_the_nodes(tiny: Path) -> None:
    async with parts(tiny) as one:
        response = await one.client.post(COMPLETIONS, json=BODY, headers={"x-priority": "high"})
        assert response.status_code == 200
        assert {row.request.priority for row in rows([*one.prefill, *one.decode])} == {"high"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_that_is_lost_costs_no_token(tiny: Path, role: str) -> None:
    gate = Gate()
    async with parts(tiny, prefill=2, decode=2, gates={role: gate}) as one:
        expected = await answer(one)
        pool = getattr(one, role)
        gate.shut()
        asking = asyncio.create_task(answer(one))
        busy = await until(lambda: [s for s in pool if one.worker(s)._jobs], "a node has the request")
        lost = next(peer for peer in one.router.peers if peer.address == one.worker(busy[0]).address)
        if role == "decode":
            gate.let(6)
            await busy[0].gate.engine_held()
        lost._lose("the test says so")
        gate.open()
        assert await asking == expected
        assert one.router.stats(addresses=False)["metrics"]["rerouted_requests"] == 1
        await one.up()  # it takes part again
        await freed(one)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"noise",
        wire.encoded(wire.Said(0, 1 << 20, "x")),
        wire.encoded(wire.Said(0, 5, "x", drawn=TokenLogprob(-1, 0.0))),
    ],
    ids=["nothing", "noise", "a token", "a logprob"],
)
async def test_a_node_that_says_what_none_says_is_left(tiny: Path, said: bytes) -> None:
    gate = Gate()
    async with parts(tiny, decode=2, gates={"decode": gate}) as one:
        expected = await answer(one)
        gate.shut()
        asking = asyncio.create_task(answer(one))
        busy = await until(lambda: [s for s in one.decode if one.worker(s)._jobs], "a node has the request")
        worker = one.worker(busy[0])
        [(router, _)] = worker._jobs
        worker._socket.send_multipart([router, said])
        await until(lambda: one.router.stats(addresses=False)["metrics"]["rerouted_requests"], "it is left")
        gate.open()
        assert await asking == expected
        assert one.router.counts.refused["message"] == 1
        await one.up()
        await freed(one)


async def test_a_node_of_which_nothing_comes_is_left(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with parts(tiny, prefill=2, gates={"prefill": gate}) as one:
        expected = await answer(one)
        gate.shut()
        asking = asyncio.create_task(answer(one))
        busy = await until(lambda: [s for s in one.prefill if one.worker(s)._jobs], "a node has the request")
        monkeypatch.setattr(busy[0].app.state.service.bridge._loop, "silent_s", lambda: 100.0)
        await until(lambda: one.router.stats(addresses=False)["metrics"]["rerouted_requests"], "it is left")
        peer = next(peer for peer in one.router.peers if peer.address == one.worker(busy[0]).address)
        await until(lambda: peer.pong, "it answers again")
        assert not peer.takes
        gate.open()
        assert await asking == expected


async def test_a_node_that_drains_gets_nothing_new_and_loses_nobody(tiny: Path) -> None:
    gate = Gate()
    async with parts(tiny, decode=2, gates={"decode": gate}) as one:
        expected = await answer(one)
        gate.shut()
        asking = asyncio.create_task(answer(one))
        decode = [peer for peer in one.router.peers if peer.role == "decode"]
        busy = await until(lambda: [peer for peer in decode if peer.num_running], "a node runs")
        assert (await one.client.post(f"/router/nodes/{busy[0].name}/drain")).status_code == 200
        others = [asyncio.create_task(answer(one, prompt=f"another question {i}")) for i in range(4)]
        await until(lambda: sum(peer.num_running for peer in decode) == 5, "all run")
        assert busy[0].num_running == 1
        gate.open()
        assert await asking == expected
        await asyncio.gather(*others)
        assert busy[0].num_sent + 4 == sum(peer.num_sent for peer in decode)
        assert (await one.client.delete(f"/router/nodes/{busy[0].name}/drain")).status_code == 200
        assert busy[0].takes
        assert (await one.client.post("/router/nodes/nobody/drain")).status_code == 404


async def test_requests_beyond_what_may_wait_are_refused_before_anything_runs(tiny: Path) -> None:
    gate = Gate()
    async with parts(tiny, gates={"prefill": gate}, of_nodes={"parallel": 1}, max_queue_depth=1) as one:
        gate.shut()
        running = [asyncio.create_task(answer(one)) for _ in range(2)]
        await until(lambda: len(one.router._jobs) == 2, "both are there")
        refused = await one.post(COMPLETIONS, BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "queue_full"
        gate.open()
        await asyncio.gather(*running)


async def test_without_a_node_requests_are_refused_at_once(tiny: Path) -> None:
    async with parts(tiny) as one:
        for peer in one.router.peers:
            peer.drains = True
        refused = await one.post(COMPLETIONS, BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_node")


async def test_a_node_of_another_model_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    from tests.server.roles.parts import address_of, node
    from tests.tiny import write_checkpoint

    other = write_checkpoint(tmp_path / "other", "gemma3_text", seed=5)
    async with parts(tiny) as one, node(other, "decode") as stranger:
        from server.roles.peer import Peer

        peer = Peer(
            "decode", 9, address_of(stranger), sockets=one.router._sockets, router=b"router x",
            counts=one.router.counts, unfit=one.router._unfit, on_change=one.router._changed,
        )  # fmt: skip
        one.router.peers.append(peer)
        await until(lambda: peer.refused, "a refusal")
        assert "the model is another one" in peer.status
        assert await answer(one)


async def test_errors_of_nodes_reach_the_client_as_they_are(tiny: Path) -> None:
    async with parts(tiny) as one:
        too_long = await one.post(CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]})
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")

        def fails(tick: Any) -> Any:
            raise RuntimeError("made to fail")

        one.decode[0].engine.run = fails  # type: ignore[method-assign]
        failed = await one.post(COMPLETIONS, BODY)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "step_failed")
        del one.decode[0].engine.run
        assert await answer(one)
        await freed(one)


async def test_its_document_has_every_route(tiny: Path) -> None:
    async with parts(tiny) as one:
        told = (await one.client.get("/openapi.json")).json()
        openapi_spec_validator.validate(told)
        paths = {(method.upper(), path) for path, methods in told["paths"].items() for method in methods}
        assert paths == OPERATIONS.keys() | ROUTER_OPERATIONS.keys()
        assert (await one.client.get("/v1/cache/stats")).status_code == 501
        assert (await one.client.get("/slots")).json()[0]["is_processing"] is False


def test_a_lost_node_is_an_engine_fault() -> None:
    assert "gone" in str(NodeLost("a node is gone"))


async def test_a_router_that_was_silent_hears_that_its_requests_were_ended(tiny: Path) -> None:
    gate = Gate()
    async with parts(tiny, decode=2, gates={"decode": gate}) as one:
        expected = await answer(one)
        gate.shut()
        asking = asyncio.create_task(answer(one))
        busy = await until(lambda: [s for s in one.decode if one.worker(s)._jobs], "a node has the request")
        worker = one.worker(busy[0])

        def elsewhere() -> bool:
            for router in worker._heard_s:
                worker._heard_s[router] = 0.0  # whatever it says in between
            return bool(one.router.stats(addresses=False)["metrics"]["rerouted_requests"])

        await until(elsewhere, "it goes elsewhere")
        gate.open()
        assert await asking == expected
        await freed(one)
