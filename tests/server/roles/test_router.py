"""What a router does with its nodes: who runs what, who hears of a cancel, and what a node that goes leaves."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx2
import openapi_spec_validator
import pytest

from engine.config import EngineConfig
from engine.request import TokenLogprob
from mlxcel_cli.transport import InProcess
from server.app import make_app
from server.config import ServerConfig
from server.openapi import OPERATIONS, ROUTER_OPERATIONS
from server.roles import wire
from server.roles.peer import NodeLost
from server.roles.worker import Worker
from tests.cluster import free_ports
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


async def held(one: Parts, gate: Gate) -> tuple[asyncio.Task[str], Worker]:
    """A request that is on its way, and the decode node at whose shut `gate` it waits."""
    gate.shut()
    asking = asyncio.create_task(answer(one))
    busy = await until(lambda: [s for s in one.decode if one.worker(s)._jobs], "a node has the request")
    return asking, one.worker(busy[0])


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
        asking, worker = await held(one, gate)
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
        monkeypatch.setattr(busy[0].app.state.service.models.default.bridge._loop, "silent_s", lambda: 100.0)
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


async def test_a_node_that_says_that_it_goes_is_asked_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.roles.peer.PING_S", 60.0)  # so that it says so to nobody else
    async with parts(tiny, prefill=2, decode=2) as one:
        expected = await answer(one)
        going = [one.prefill[0], one.decode[0]]
        for service in going:
            one.worker(service).drain()
        before = one.router.course.counts["rerouted"]
        for _ in range(4):
            assert await answer(one) == expected
        assert one.router.course.counts["rerouted"] - before <= len(going)


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


async def test_a_router_that_was_silent_hears_that_its_requests_were_ended(tiny: Path) -> None:
    gate = Gate()
    async with parts(tiny, decode=2, gates={"decode": gate}) as one:
        expected = await answer(one)
        asking, worker = await held(one, gate)

        def elsewhere() -> bool:
            for router in worker._heard_s:
                worker._heard_s[router] = 0.0  # whatever it says in between
            return bool(one.router.stats(addresses=False)["metrics"]["rerouted_requests"])

        await until(elsewhere, "it goes elsewhere")
        gate.open()
        assert await asking == expected
        await freed(one)


async def test_what_is_too_long_to_be_passed_on_is_refused_before_anything_is_sent(tiny: Path) -> None:
    async with parts(tiny) as one:
        refused = await one.post(COMPLETIONS, {**BODY, "stop": ["x" * 5_000_000]})
        assert refused.status_code == 400
        assert "a router passes on" in refused.json()["error"]["message"]
        assert one.router.stats(addresses=False)["metrics"]["failure_events"] == 0


async def test_numbers_of_any_size_mean_what_they_mean_elsewhere(tiny: Path) -> None:
    async with parts(tiny) as one:
        expected = await answer(one)
        assert await answer(one, top_k=2**70, seed=2**80, min_keep=2**66, repeat_last_n=2**65) == expected


@pytest.mark.parametrize("num_requests", [1, 4])
async def test_a_row_that_goes_on_where_it_began_does_not_wait_for_itself(tiny: Path, num_requests: int) -> None:
    gate = Gate()
    async with parts(tiny, gates={"decode": gate}, of_nodes={"parallel": num_requests}) as one:
        expected = [await answer(one, prompt=f"question {i}") for i in range(num_requests)]
        [decode] = [peer for peer in one.router.peers if peer.role == "decode"]
        gate.shut()
        asking = [asyncio.create_task(answer(one, prompt=f"question {i}")) for i in range(num_requests)]
        await until(lambda: decode.num_running == num_requests, "all are handed over")
        decode.drains = True
        for request in list(decode._inboxes):
            decode._inboxes[request].put_nowait(NodeLost("the test says so"))
        clock = asyncio.get_running_loop().time
        since_s = clock()
        assert await asyncio.gather(*asking) == expected
        assert clock() - since_s < 20  # and not the minute for which a state is kept
        gate.open()


async def test_whoever_waits_for_one_pool_does_not_hold_up_those_for_the_other(tiny: Path) -> None:
    gate = Gate()
    async with parts(tiny, gates={"decode": gate}, of_nodes={"parallel": 1, "max_queue_depth": 0}) as one:
        expected = [await answer(one, prompt=f"question {i}") for i in range(3)]
        gate.shut()

        async def ask(number: int, priority: str) -> str:
            body = {**BODY, "prompt": f"question {number}"}
            response = await one.client.post(COMPLETIONS, json=body, headers={"x-priority": priority})
            text: str = response.json()["choices"][0]["text"]
            return text

        first = asyncio.create_task(ask(0, "normal"))
        await until(lambda: one.worker(one.decode[0])._jobs, "the first decodes")
        second = asyncio.create_task(ask(1, "normal"))
        await until(lambda: one.worker(one.prefill[0])._leaving, "the second waits to be fetched")
        third = asyncio.create_task(ask(2, "high"))
        await until(lambda: one.router.course.num_waiting == 2, "the third waits to be computed")
        gate.open()
        async with asyncio.timeout(20):
            assert await asyncio.gather(first, second, third) == expected


async def test_a_node_that_is_full_is_no_lost_node(tiny: Path) -> None:
    gate = Gate()
    async with parts(tiny, gates={"decode": gate}, of_nodes={"parallel": 1, "max_queue_depth": 0}) as one:
        expected = await answer(one)
        gate.shut()
        beside = asyncio.create_task(one.decode[0].answer(COMPLETIONS, BODY))
        await until(lambda: one.decode[0].loop._num_live, "somebody else has the slot")
        asking = asyncio.create_task(answer(one))
        await until(lambda: one.worker(one.prefill[0])._leaving, "it waits for the slot")
        await asyncio.sleep(0)
        gate.open()
        assert await asking == expected
        await beside
        assert one.router.stats(addresses=False)["metrics"]["rerouted_requests"] == 0


@pytest.mark.parametrize(
    "change",
    [{"first": 3}, {"shape": (1, 1, 0, 8)}, {"dtype": "int64"}, {"layer": 7}],
    ids=str,
)
async def test_states_that_are_wrong_are_computed_again(tiny: Path, change: dict[str, Any]) -> None:
    async with parts(tiny) as one:
        expected = await answer(one)
        leave = one.worker(one.prefill[0])._leave

        def wrongly(job: Any, event: Any) -> None:
            state = event.departing.state
            arrays = (dataclasses.replace(state.arrays[0], **change), *state.arrays[1:])
            departing = dataclasses.replace(event.departing, state=dataclasses.replace(state, arrays=arrays))
            leave(job, dataclasses.replace(event, departing=departing))

        one.worker(one.prefill[0])._leave = wrongly  # type: ignore[method-assign]
        for number in range(7):  # more than an engine's loop bears of steps that fail
            assert await answer(one) == expected, number
        assert one.worker(one.decode[0]).counts.refused["state"] == 7
        await freed(one)


async def test_a_state_that_cannot_be_read_is_computed_again(tiny: Path) -> None:
    async with parts(tiny) as one:
        expected = await answer(one)

        def fails(arriving: Any, storage: Any) -> None:
            raise RuntimeError("made to fail")

        one.decode[0].engine.transfer.land = fails  # type: ignore[method-assign]
        for _ in range(7):
            assert await answer(one) == expected
        await freed(one)


async def test_a_request_that_a_node_refuses_is_answered(tiny: Path) -> None:
    async with parts(tiny) as one:
        [prefill] = [peer for peer in one.router.peers if peer.role == "prefill"]
        say = prefill.say

        def spoilt(message: Any) -> None:
            if isinstance(message, wire.Start):
                request = dataclasses.replace(message.request, prompt=(1 << 30,))
                message = wire.Start(message.number, request, message.begun, message.fetch)
            say(message)

        prefill.say = spoilt  # type: ignore[method-assign]
        async with asyncio.timeout(20):
            refused = await one.post(COMPLETIONS, BODY)
        assert refused.status_code == 500


async def test_a_router_without_nodes_is_not_ready(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with parts(tiny) as one:
        assert (await one.client.get("/health/ready")).status_code == 200
        for peer in one.router.peers:
            peer.drains = True
        assert (await one.client.get("/health/ready")).status_code == 503
    monkeypatch.setattr("server.roles.router.WAIT_S", 0.2)
    config = ServerConfig(
        EngineConfig(model=tiny), "tiny", node_role="router", decode_peers=(f"127.0.0.1:{free_ports(1)[0]}",)
    )
    async with httpx2.AsyncClient(
        transport=InProcess(make_app(config)), base_url="http://localhost", timeout=60
    ) as client:
        assert (await client.get("/health")).json() == {"status": "waiting for nodes"}
        refused = await client.post(COMPLETIONS, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_node")
        assert "decode" in refused.json()["error"]["message"]
