"""What comes to a node and is no message: it is counted and named, nothing is allocated for it, all goes on."""

import asyncio
import os
import random
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.utils import z85

from engine.config import EngineConfig
from engine.errors import ConfigError, UserError
from server.config import ServerConfig
from server.roles import wire
from server.roles.keys import keygen, read_keys
from server.roles.sockets import Sockets
from tests.cluster import resident_bytes
from tests.server.roles.parts import address_of, node, parts, until
from tests.server.roles.test_wire import TO_NODE
from tests.serving import COMPLETIONS

pytestmark = pytest.mark.anyio
BODY = {"prompt": "a question", "max_tokens": 8, "temperature": 0}
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)


async def test_noise_on_the_listener_is_counted_and_costs_nothing(tiny: Path) -> None:
    async with parts(tiny) as one:
        expected = (await one.post(COMPLETIONS, BODY)).json()["choices"]
        worker = one.worker(one.decode[0])
        host, port = worker.address.split(":")
        before = resident_bytes(os.getpid())
        chance = random.Random(1)

        def knock(sent: bytes) -> None:
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                try:
                    connection.sendall(sent)
                    connection.settimeout(0.2)
                    connection.recv(100)
                except OSError:
                    pass

        ready = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
        for sent in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00" * 64,
            chance.randbytes(5000),
            GREETING + chance.randbytes(500),
            GREETING + ready + b"\x02" + struct.pack(">Q", 1 << 40),  # a frame of a terabyte
            GREETING + ready + b"\x02" + struct.pack(">Q", wire.MAX_MESSAGE_BYTES + 1) + bytes(1000),
        ):
            await asyncio.to_thread(knock, sent)
        await until(lambda: worker.counts.refused["handshake"] >= 3, "refused handshakes")
        assert resident_bytes(os.getpid()) - before < 8 * wire.MAX_MESSAGE_BYTES
        assert (await one.post(COMPLETIONS, BODY)).json()["choices"] == expected
        text = (await one.decode[0].client.get("/metrics")).text
        assert 'mlxcel_node_refused_total{reason="handshake"}' in text


async def test_messages_that_are_none_are_counted_and_the_node_goes_on(tiny: Path) -> None:
    async with parts(tiny) as one:
        expected = (await one.post(COMPLETIONS, BODY)).json()["choices"]
        worker = one.worker(one.decode[0])
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.connect(f"tcp://{worker.address}")
        chance = random.Random(2)
        try:
            for number in range(400):
                frame = bytearray(wire.encoded(chance.choice(TO_NODE)))
                match number % 4:
                    case 0:
                        await stranger.send(chance.randbytes(chance.randrange(100)))
                    case 1:
                        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
                        await stranger.send(bytes(frame))
                    case 2:
                        await stranger.send_multipart([bytes(frame), chance.randbytes(9)])
                    case _:
                        await stranger.send_multipart([b""] * chance.randrange(1, 5))
            await stranger.send(wire.encoded(wire.Ping()))
            while not isinstance(wire.for_router(await stranger.recv()), wire.Pong):
                pass
            assert worker.counts.refused["message"] > 200
            assert not worker.counts.refused["fault"]
            assert (await one.post(COMPLETIONS, BODY)).json()["choices"] == expected
        finally:
            context.destroy(linger=0)
        await until(lambda: not worker._jobs, "what the stranger has begun is ended")
        await one.decode[0].warmed_up()


async def test_a_state_that_does_not_fit_is_refused_and_the_row_computed_again(tiny: Path) -> None:
    async with parts(tiny) as one:
        expected = (await one.post(COMPLETIONS, BODY)).json()["choices"]
        worker = one.worker(one.decode[0])
        assert worker._welcome is not None
        worker._welcome = type(worker._welcome)(
            **{
                **{name: getattr(worker._welcome, name) for name in worker._welcome.__struct_fields__},
                "identity": worker._welcome.identity.__class__("another", ("full",), "float32"),
            }
        )
        assert (await one.post(COMPLETIONS, BODY)).json()["choices"] == expected
        assert worker.counts.refused["state"] == 1
        assert worker.counts.states == {"fetched": 1, "recomputed": 1}


@pytest.fixture
def keyed(tmp_path: Path) -> Any:
    """Settings of a node, by its name: its key, and the public keys of all."""
    public = {name: keygen(tmp_path / name) for name in ("one", "two", "stranger")}
    peers = tmp_path / "peers"

    def settings(name: str, **addresses: str) -> dict[str, Any]:
        lines = [f"{public[known]} {addresses.get(known, '')}" for known in ("one", "two")]
        peers.write_text("# who may talk\n" + "\n".join(lines) + "\n")
        return {"node_key": tmp_path / name, "node_peers": peers}

    return settings


async def test_only_peers_with_a_known_key_are_let_in(tiny: Path, tmp_path: Path, keyed: Any) -> None:
    async with node(tiny, "decode", server=keyed("one")) as service:
        worker = service.app.state.service.node.worker

        async def welcomed(name: str, **more: Any) -> bool:
            settings = keyed(name, one=worker.address)
            sockets = Sockets(read_keys(**{"own": settings["node_key"], "peers": settings["node_peers"]}))
            sockets.start()
            dealer = sockets.connect(worker.address, name.encode())
            dealer.send_multipart([wire.encoded(wire.Hello())])
            try:
                frame = await asyncio.wait_for(dealer.recv(), 3 if name != "stranger" else 1)
                return isinstance(wire.for_router(frame), wire.Welcome)
            except TimeoutError:
                return False
            finally:
                await sockets.close()

        await service.app.state.service.models.default.bridge.model()
        assert await welcomed("two")
        assert not await welcomed("stranger")
        assert worker.counts.refused["key"] >= 1
        plain = zmq.asyncio.Context()
        dealer = plain.socket(zmq.DEALER)
        dealer.connect(f"tcp://{worker.address}")
        dealer.send(wire.encoded(wire.Hello()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(dealer.recv(), 1)
        plain.destroy(linger=0)


async def test_a_whole_cluster_with_keys(tiny: Path, keyed: Any) -> None:
    async with parts(tiny) as plain:
        expected = (await plain.post(COMPLETIONS, BODY)).json()["choices"]
    async with (
        node(tiny, "prefill", server=keyed("one")) as first,
        node(tiny, "decode", server=keyed("two")) as second,
    ):
        keyed("one", one=address_of(first), two=address_of(second))
        # A node reads whose key is at which address when it starts, and these ports were not known then.
        known = read_keys(first.app.state.service.config.node_key, first.app.state.service.config.node_peers)
        assert known is not None
        for service in (first, second):
            service.app.state.service.node._keys.by_address.update(known.by_address)
        import httpx2

        from mlxcel_cli.transport import InProcess
        from server.app import make_app

        config = ServerConfig(
            EngineConfig(model=tiny), "tiny", node_role="router", prefill_peers=(address_of(first),),
            decode_peers=(address_of(second),), **keyed("one", one=address_of(first), two=address_of(second)),
        )  # fmt: skip
        app = make_app(config)
        async with httpx2.AsyncClient(transport=InProcess(app), base_url="http://localhost", timeout=60) as client:
            assert (await client.post(COMPLETIONS, json=BODY)).json()["choices"] == expected
        assert second.app.state.service.node.worker.counts.states == {"fetched": 1}


def test_keys_are_needed_beyond_this_machine(tiny: Path, tmp_path: Path) -> None:
    engine = EngineConfig(model=tiny)
    for said in (
        {"node_role": "decode", "serving_bind": "0.0.0.0:5000"},
        {"node_role": "router", "prefill_peers": ("10.0.0.1:5000",)},
    ):
        with pytest.raises(ConfigError, match="beyond this machine"):
            ServerConfig(engine, "tiny", **said)
        ServerConfig(engine, "tiny", node_key=tmp_path / "k", node_peers=tmp_path / "p", **said)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"node_role": "decode"}, "serving_bind"),
        ({"node_role": "router"}, "prefill_peers"),
        ({"serving_bind": "127.0.0.1:1"}, "serving_bind"),
        ({"prefill_peers": ("127.0.0.1:1",)}, "prefill_peers"),
        ({"node_role": "prefill", "serving_bind": "127.0.0.1"}, "serving_bind"),
        ({"node_role": "router", "decode_peers": ("127.0.0.1:1", "127.0.0.1:1")}, "decode_peers"),
        ({"node_role": "router", "decode_peers": ("127.0.0.1:99999",)}, "decode_peers"),
        ({"node_key": Path("x")}, "node_key"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_role_are_refused(tiny: Path, said: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig(EngineConfig(model=tiny), "tiny", **said)
    assert refused.value.setting == name


def test_a_router_is_not_told_what_engines_do(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="a router has none"):
        ServerConfig(
            EngineConfig(model=tiny, parallel=2), "tiny", node_role="router", decode_peers=("127.0.0.1:1",)
        )


def test_key_files(tmp_path: Path) -> None:
    public = keygen(tmp_path / "key")
    assert len(z85.encode(bytes.fromhex(public))) == 40
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="there already"):
        keygen(tmp_path / "key")
    peers = tmp_path / "peers"
    peers.write_text(f"{public} 10.0.0.1:5000 # the first\n\n# nobody\n")
    keys = read_keys(tmp_path / "key", peers)
    assert keys is not None
    assert keys.of("10.0.0.1:5000") in keys.allowed
    with pytest.raises(UserError, match="no key for the node"):
        keys.of("10.0.0.2:5000")
    assert read_keys(None, None) is None
    for own, other, said in (
        (None, peers, "needs node_key"),
        (tmp_path / "key", None, "needs node_peers"),
        (peers, peers, "no lines"),
        (tmp_path / "none", peers, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_keys(own, other)
    peers.write_text("nonsense\n")
    with pytest.raises(ConfigError, match="no key of 64"):
        read_keys(tmp_path / "key", peers)
    peers.write_text(f"{public}\n")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        read_keys(tmp_path / "key", peers)
