"""`POST /v1/embeddings`: its fields, its order, its bounds, and what it shares the engine with."""

import asyncio
import base64
import itertools
import json
import struct

import numpy as np
import pytest

from engine.request import Request
from server.vectors import Vectors
from tests.encoders import write_encoder
from tests.engine.model.test_base import headless
from tests.serving import CHAT, COMPLETIONS, MESSAGES, RESPONSES, served, tokens_of
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.anyio

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture
async def service(tiny):
    async with served(tiny, ctx_size=256) as service:
        yield service


def vectors_of(answer):
    return [entry["embedding"] for entry in answer["data"]]


async def error_of(service, body, status=400):
    response = await service.post(EMBEDDINGS, body)
    assert response.status_code == status, response.text
    return response.json()["error"]


async def test_one_input(service):
    answer = await service.answer(EMBEDDINGS, {"model": "tiny", "input": "Hello", "user": "someone"})
    [entry] = answer["data"]
    assert answer.keys() == {"object", "data", "model", "usage"}
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert (entry["object"], entry["index"], len(entry["embedding"])) == ("embedding", 0, 32)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert np.linalg.norm(entry["embedding"]) == pytest.approx(1)


async def test_texts_and_ids_in_any_form_are_the_same(service):
    ids = tokens_of("Hello")
    forms = ["Hello", ["Hello"], ids, [ids]]
    answers = [vectors_of(await service.answer(EMBEDDINGS, {"input": form})) for form in forms]
    assert answers == [answers[0]] * 4


async def test_many_inputs_come_in_their_order_and_leave_the_queue_to_others(service):
    texts = [f"{i} " + "x" * (i * 7 % 40) for i in range(100)]
    alone = [vectors_of(await service.answer(EMBEDDINGS, {"input": text}))[0] for text in texts[:10]]
    service.gate.shut()
    asked = asyncio.ensure_future(service.answer(EMBEDDINGS, {"input": texts}))
    await service.gate.engine_held()
    assert 0 < service.loop._num_live <= 2 * service.engine.num_slots
    service.gate.open()
    answer = await asked
    assert [entry["index"] for entry in answer["data"]] == list(range(100))
    assert vectors_of(answer)[:10] == alone
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    assert max(len(tick.prefill) for tick in service.engine.ticks) > 1


async def test_base64_is_little_endian_float32(service):
    [text] = vectors_of(await service.answer(EMBEDDINGS, {"input": "Hello", "encoding_format": "base64"}))
    [numbers] = vectors_of(await service.answer(EMBEDDINGS, {"input": "Hello", "encoding_format": "float"}))
    raw = base64.b64decode(text)
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == numbers


async def test_pooling_dimensions_and_normalize(service):
    [last] = vectors_of(await service.answer(EMBEDDINGS, {"input": "Hello", "normalize": False}))
    [mean] = vectors_of(
        await service.answer(EMBEDDINGS, {"input": "Hello", "pooling": "mean", "normalize": False})
    )
    [short] = vectors_of(await service.answer(EMBEDDINGS, {"input": "Hello", "dimensions": 4}))
    assert last != mean
    assert np.allclose(short, np.array(last[:4]) / np.linalg.norm(last[:4]), rtol=1e-6)


async def test_beside_a_chat(service):
    """Both come to what each comes to alone, whoever shares a forward."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "temperature": 0}
    embed = {"input": [f"text {i}" for i in range(30)]}
    alone = await service.answer(CHAT, chat), await service.answer(EMBEDDINGS, embed)
    both = await asyncio.gather(service.answer(CHAT, chat), service.answer(EMBEDDINGS, embed))
    assert both[0]["choices"] == alone[0]["choices"]
    assert both[1] == alone[1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1, 100000]}, "input"),
        ({"input": [[1], [-1]]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 33}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "truncate": True}, "truncate"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
async def test_what_cannot_be_is_refused_by_name(service, body, param):
    error = await error_of(service, body)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_another_model_is_refused(service):
    assert (await error_of(service, {"input": "a", "model": "other"}, 404))["code"] == "model_not_found"


async def test_an_input_may_fill_the_context_and_no_more(service):
    assert (await service.answer(EMBEDDINGS, {"input": "x" * 256}))["usage"]["prompt_tokens"] == 256
    for text, given in (("x" * 257, "257"), ("x" * 10_000, "at least")):
        error = await error_of(service, {"input": ["a", text]})
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
        assert given in error["message"]
        assert "256" in error["message"]
    assert not service.loop._num_live


async def test_a_full_queue_refuses(tiny):
    async with served(tiny, parallel=1, max_queue_depth=1) as service:
        service.gate.shut()
        chats = [
            asyncio.ensure_future(service.answer(COMPLETIONS, {"prompt": f"{i}", "max_tokens": 2}))
            for i in range(2)
        ]
        await service.submitted(2)
        response = await service.post(EMBEDDINGS, {"input": ["a", "b"]})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert "retry-after" in response.headers
        service.gate.open()
        await asyncio.gather(*chats)
        many = {"input": [f"{i}" for i in range(20)]}
        assert len(vectors_of(await service.answer(EMBEDDINGS, many))) == 20


async def test_what_was_begun_is_not_refused_when_others_have_taken_its_place(tiny, monkeypatch):
    """Whenever one of its inputs ends, somebody fills the queue before the next of them can be put there."""
    take, others = Vectors._take, itertools.count()

    def taken_after_others(vectors, place, vector):
        service.gate.shut()
        while not vectors._bridge.is_full:
            vectors._bridge.enqueue(Request(f"other-{next(others)}", (1, 2), max_tokens=1), lambda event: None)
        take(vectors, place, vector)
        service.gate.open()

    async with served(tiny, parallel=1, max_queue_depth=1) as service:
        body = {"input": [f"text {i}" for i in range(6)]}
        alone = await service.answer(EMBEDDINGS, body)
        monkeypatch.setattr(Vectors, "_take", taken_after_others)
        assert await service.answer(EMBEDDINGS, body) == alone
        assert next(others) >= 2


async def test_a_client_that_leaves_frees_its_rows(service):
    service.gate.shut()
    asked = asyncio.ensure_future(service.post(EMBEDDINGS, {"input": ["x" * 100] * 50}))
    await service.gate.engine_held()
    asked.cancel()
    await asyncio.wait([asked])
    await service.exchanges_ended()
    service.gate.open()
    assert len((await service.answer(EMBEDDINGS, {"input": "a"}))["data"]) == 1
    assert len(service.engine.rows) < 20


async def test_a_request_is_cancelled_by_its_id(service):
    service.gate.shut()
    asked = asyncio.ensure_future(
        service.post(EMBEDDINGS, {"input": ["x"] * 50}, headers={"X-Request-Id": "mine", "X-Priority": "low"})
    )
    await service.gate.engine_held()
    assert (await service.post("/v1/requests/mine/cancel", {})).status_code == 200
    response = await asked
    assert (response.status_code, response.headers["x-request-id"]) == (499, "mine")
    service.gate.open()


async def test_a_fault_of_one_input_fails_the_request(tiny):
    async with served(tiny) as service:
        run = service.engine._forward.run

        def fails(spans):
            if any(len(span.tokens) == 13 for span in spans):
                raise RuntimeError("the forward broke")
            return run(spans)

        service.engine._forward.run = fails
        error = await error_of(service, {"input": ["a", "b" * 13, *"cdefghijklmnop"]}, 500)
        assert error["code"] == "step_failed"
        assert (await service.answer(EMBEDDINGS, {"input": "a"}))["data"]


async def test_slots_events_and_metrics(service):
    service.gate.shut()
    asked = asyncio.ensure_future(service.answer(EMBEDDINGS, {"input": ["abc", "de"]}))
    await service.gate.engine_held()
    service.gate.let(1)
    slots = (await service.client.get("/slots")).json()
    assert len(slots) == service.engine.num_slots
    service.gate.open()
    await asked
    text = (await service.client.get("/metrics")).text
    counted = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(counted['mlxcel_requests_total{outcome="stop"}']) == 2
    assert float(counted["mlxcel_prompt_tokens_total"]) == 5
    assert float(counted["mlxcel_completion_tokens_total"]) == 0


async def test_a_model_without_a_head_that_is_seen_refuses(tiny, monkeypatch):
    monkeypatch.setattr("engine.engine.hidden_size", lambda forward: 0)
    async with served(tiny) as service:
        error = await error_of(service, {"input": "a"}, 501)
        assert (error["type"], error["code"]) == ("not_supported_error", "no_embeddings")
        assert (await service.answer(COMPLETIONS, {"prompt": "a", "max_tokens": 1}))["choices"]


@pytest.mark.parametrize("kind", ["headless", "encoder"])
async def test_a_model_made_for_embeddings_continues_nothing(tmp_path, kind):
    turn = [{"role": "user", "content": "Hi"}]
    folder = tmp_path / kind
    async with served(
        headless(write_checkpoint(folder)) if kind == "headless" else write_encoder(folder)
    ) as service:
        assert len((await service.answer(EMBEDDINGS, {"input": "a"}))["data"]) == 1
        for path, body in {
            COMPLETIONS: {"prompt": "a"},
            CHAT: {"messages": turn},
            MESSAGES: {"messages": turn, "max_tokens": 5},
            RESPONSES: {"input": "Hi"},
            "/completion": {"prompt": "a"},
        }.items():
            response = await service.post(path, body)
            assert response.status_code == 501, response.text
            assert "embeddings" in response.json()["error"]["message"]


async def test_an_encoder_answers_many_as_each_alone(tmp_path):
    texts = [f"{i} " + "x" * (i * 7 % 40) for i in range(30)]
    async with served(write_encoder(tmp_path / "bert")) as service:
        alone = [vectors_of(await service.answer(EMBEDDINGS, {"input": text}))[0] for text in texts]
        answer = await service.answer(EMBEDDINGS, {"input": texts})
        assert vectors_of(answer) == alone
        error = await error_of(service, {"input": "x" * 65})
        assert error["code"] == "context_length_exceeded"
        for path in ("/slots", "/props", "/v1/models", "/metrics", "/v1/cache/stats", "/health/ready"):
            assert (await service.client.get(path)).status_code == 200, path
