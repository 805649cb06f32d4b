"""OpenAI's Responses: what items become, that a folded stream is the whole response, and what is kept of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from server.continued import Responses
from server.errors import UnknownResponse
from server.items import turns_of
from server.logprobs import without_bytes
from tests.replies import CALL, CUT_CALL, LONG, LONG_CALL, OTHER
from tests.serving import RESPONSES, Served, served, tokens_of
from tests.serving import ScriptedSampler as Script
from tests.templates import PLAIN, THINKING, THINKS_ITSELF, checkpoint

pytestmark = pytest.mark.anyio

HI: dict[str, Any] = {"input": "hi"}
HI_ITEMS = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
TOOLS = [
    {
        "type": "function",
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
    {"type": "function", "name": "sub", "strict": True},
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def script(text: str) -> Script:
    return Script({0: tokens_of(text)})


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response as deltas tell it; every `done` says the same once more."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"] == events[1]["response"]
    output: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind, item = event["type"], output[-1] if output else {}
        if kind == "response.output_item.added":
            assert event["output_index"] == len(output)
            output.append(json.loads(json.dumps(event["item"])))
            continue
        assert event["output_index"] == len(output) - 1
        if kind == "response.output_item.done":
            item["status"] = event["item"]["status"]
            assert event["item"] == item
            continue
        assert event["item_id"] == item["id"]
        match kind.removeprefix("response.").split("."):
            case ["content_part", "added"]:
                assert event["content_index"] == len(item["content"])
                item["content"].append(event["part"])
            case ["content_part", "done"]:
                part = item["content"][event["content_index"]]
                if event["part"].get("logprobs"):
                    assert without_bytes(event["part"]["logprobs"]) == part["logprobs"]
                    part["logprobs"] = event["part"]["logprobs"]
                assert event["part"] == part
            case ["function_call_arguments", "delta"]:
                item["arguments"] += event["delta"]
            case ["function_call_arguments", "done"]:
                assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
            case ["output_text" | "reasoning_text", "delta"]:
                part = item["content"][event["content_index"]]
                part["text"] += event["delta"]
                if "logprobs" in part:
                    part["logprobs"] += event["logprobs"]
            case ["output_text" | "reasoning_text", "done"]:
                part = item["content"][event["content_index"]]
                assert (event["text"], event.get("logprobs")) == (part["text"], part.get("logprobs"))
            case _:
                raise AssertionError(kind)
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    return last["response"] | {"output": output}


def nameless(response: dict[str, Any]) -> dict[str, Any]:
    """Without ids and times, which no two responses share, and without what the prompt cache did."""
    hidden = {"id": "", "call_id": ""}
    output = [item | {name: "" for name in hidden if name in item} for item in response["output"]]
    return response | {"id": "", "created_at": 0, "output": output, "usage": response["usage"]["total_tokens"]}


async def answered(service: Served, body: dict[str, Any]) -> dict[str, Any]:
    """The response, the same in both modes, and strictly what OpenAI's client knows."""
    whole = await service.answer(RESPONSES, body)
    Response.model_validate(whole, strict=True)
    stream = await service.stream(RESPONSES, body)
    assert not stream.done
    for event in stream.chunks:
        EVENTS.validate_python(event, strict=True)
    assert nameless(folded(stream.chunks)) == nameless(whole)
    assert nameless(stream.chunks[-1]["response"]) == nameless(whole)
    return whole


def prompt_of(service: Served) -> str:
    return str(service.engine.language.tokens.decode(service.engine.rows[-1].request.prompt))


async def test_text_and_why_it_ended(tiny: Path) -> None:
    async with served(tiny, sampler=script("Hello there"), seed=0) as service:
        plain = await answered(service, HI | {"metadata": {"a": "b"}, "user": "u", "temperature": 1})
        cut = await answered(service, HI | {"max_output_tokens": 4})
        again = await service.answer(RESPONSES, HI)
    [message] = plain["output"]
    assert message["content"] == [
        {"type": "output_text", "text": "Hello there", "annotations": [], "logprobs": []}
    ]
    assert (plain["status"], message["status"], plain["incomplete_details"]) == ("completed", "completed", None)
    assert (plain["metadata"], plain["user"], plain["temperature"]) == ({"a": "b"}, "u", 1)
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_what_codex_sends_with_every_request_is_answered(tiny: Path) -> None:
    said = [{"type": "input_text", "text": "Be brief."}]
    body = {
        "input": [{"type": "message", "id": "msg_1", "role": "developer", "content": said}, *HI_ITEMS],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a22b58",
        "client_metadata": {"session_id": "01a22b58", "turn_id": "01a22b59"},
    }
    async with served(tiny, sampler=script("Hello there"), seed=0) as service:
        assert (await answered(service, body))["status"] == "completed"


async def test_thoughts_text_and_calls_are_items(tmp_path: Path) -> None:
    text = f"I plan.\n</think>\n\nFirst.\n{CALL}\n{OTHER}"
    async with served(checkpoint(tmp_path, THINKING), sampler=script(text), seed=0) as service:
        response = await answered(service, HI | {"tools": TOOLS})
        one = await answered(service, HI | {"tools": TOOLS, "parallel_tool_calls": False})
    thought, said, *calls = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I plan."}]
    assert said["content"][0]["text"] == "First."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("add", {"a": 2}), ("sub", {})]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert [item["type"] for item in one["output"]] == ["reasoning", "message", "function_call"]


async def test_a_call_that_was_cut_is_incomplete_and_a_whole_one_is_not(tmp_path: Path) -> None:
    whole = LONG_CALL + CUT_CALL
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(whole), seed=0) as service:
        cut = await answered(service, HI | {"tools": TOOLS, "max_output_tokens": len(tokens_of(whole))})
        left = await answered(service, HI | {"tools": TOOLS})
    for response, status in ((cut, "incomplete"), (left, "completed")):
        first, second = response["output"]
        assert (first["status"], json.loads(first["arguments"])) == ("completed", {"a": LONG})
        assert (second["status"], second["arguments"]) == ("incomplete", first["arguments"][:-1])
        assert response["status"] == status


def test_items_of_one_answer_are_one_turn() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    made = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "b"},
        {"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "f", "annotations": []}],
        },
        call,
        call,
        {"type": "function_call_output", "call_id": "c", "output": "4"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}]},
        {"type": "message", "role": "assistant", "content": None},
        {"type": "message", "role": "assistant", "content": "so"},
        {"type": "message", "role": "assistant", "content": "and"},
    ]
    assert turns_of(items) == [
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "f", "reasoning_content": "t", "tool_calls": [made, made]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "and"},
    ]


async def test_a_conversation_goes_on_from_a_response(tmp_path: Path) -> None:
    text = f"I plan.\n</think>\n\nFirst.\n{CALL}"
    result = [{"type": "function_call_output", "call_id": "c", "output": "4"}]
    async with served(checkpoint(tmp_path, THINKING), sampler=script(text), seed=0) as service:
        first = await service.answer(RESPONSES, HI | {"tools": TOOLS, "instructions": "Old."})
        stream = await service.stream(RESPONSES, HI | {"tools": TOOLS, "instructions": "Old."})
        for own in (first["id"], stream.chunks[-1]["response"]["id"]):
            second = await answered(
                service, {"input": result, "previous_response_id": own, "instructions": "New.", "tools": TOOLS}
            )
            kept = prompt_of(service)
        assert second["previous_response_id"] == own
        sent_again = [{"role": "user", "content": "hi"}, *first["output"], *result]
        await service.answer(RESPONSES, {"input": sent_again, "instructions": "New.", "tools": TOOLS})
        assert prompt_of(service) == kept
        await service.answer(RESPONSES, {"input": "and", "previous_response_id": second["id"]})
        assert "4" in prompt_of(service)
        assert "New." not in prompt_of(service)


async def test_what_is_kept_can_be_asked_for_and_forgotten(tiny: Path) -> None:
    async with served(tiny, sampler=script("Hello"), seed=0) as service:
        response = await service.answer(RESPONSES, HI)
        unkept = await service.answer(RESPONSES, HI | {"store": False})
        path = f"{RESPONSES}/{response['id']}"
        assert (await service.client.get(path)).json() == response
        deleted = await service.client.delete(path)
        assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
        for own in (response["id"], unkept["id"]):
            gone = [
                await service.client.get(f"{RESPONSES}/{own}"),
                await service.client.delete(f"{RESPONSES}/{own}"),
                await service.post(RESPONSES, HI | {"previous_response_id": own, "stream": True}),
            ]
            assert [answer.status_code for answer in gone] == [404] * 3
            assert {answer.json()["error"]["code"] for answer in gone} == {"response_not_found"}
            assert gone[-1].json()["error"]["param"] == "previous_response_id"


def test_what_is_kept_is_bounded() -> None:
    kept = Responses(max_bytes=200, max_responses=2)
    for own in ("a", "b", "a", "c"):
        kept.keep({"id": own}, [{"of": own}])
    assert kept.conversation("a") == [{"of": "a"}]
    assert kept.response("c") == {"id": "c"}
    with pytest.raises(UnknownResponse, match="'b'"):
        kept.response("b")
    kept.keep({"id": "long", "text": "x" * 150}, [])
    kept.keep({"id": "longer", "text": "x" * 300}, [])
    for own in ("a", "longer"):
        with pytest.raises(UnknownResponse):
            kept.response(own)
    assert kept.conversation("long") == []


async def test_an_answer_keeps_to_a_schema_and_calls_are_forced(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    format_ = {"type": "json_schema", "name": "one", "schema": schema, "strict": True}
    tools = [{"type": "function", "name": name, "parameters": schema} for name in ("add", "sub")]
    choice = {"type": "function", "name": "sub"}
    async with served(checkpoint(tmp_path, PLAIN), seed=0) as service:
        response = await answered(service, HI | {"text": {"format": format_}})
        called = await answered(service, HI | {"tools": tools, "tool_choice": choice})
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"a": 1}
    [call] = called["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("sub", {"a": 1})


async def test_text_that_is_given_back_has_the_logprobs_of_all_its_tokens(tmp_path: Path) -> None:
    text = CALL.replace('"add"', '"none"')
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(text), seed=0) as service:
        asked = HI | {"tools": TOOLS, "include": ["message.output_text.logprobs"]}
        response = await answered(service, asked)
    [part] = response["output"][0]["content"]
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode() == part["text"] == text


async def test_logprobs_are_those_of_the_text(tmp_path: Path) -> None:
    text = f"I plan.\n</think>\n\nFirst é.\n{CALL}"
    asked = HI | {"tools": TOOLS, "include": ["message.output_text.logprobs"]}
    async with served(checkpoint(tmp_path, THINKING), sampler=script(text), seed=0) as service:
        response = await answered(service, asked | {"top_logprobs": 2})
        bare = await answered(service, asked)
        none = await answered(service, HI)
    [part] = response["output"][1]["content"]
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode() == part["text"] == "First é."
    assert {len(one["top_logprobs"]) for one in part["logprobs"]} == {2}
    assert (response["top_logprobs"], none["top_logprobs"]) == (2, 0)
    assert [one["top_logprobs"] for one in bare["output"][1]["content"][0]["logprobs"]] == [[]] * 9
    assert none["output"][1]["content"][0]["logprobs"] == []


async def test_tools_that_are_not_allowed_are_told_of_and_not_called(tmp_path: Path) -> None:
    text = f"So.\n{CALL}\n{OTHER}"
    asked = HI | {"tools": TOOLS}

    def choice(mode: str) -> dict[str, Any]:
        return {"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": [SUB]}}

    async with served(checkpoint(tmp_path / "a", PLAIN), sampler=script(text), seed=0) as service:
        await service.answer(RESPONSES, asked)
        response = await answered(service, asked | choice("auto"))
        assert len({row.request.prompt for row in service.engine.rows}) == 1
    said, call = response["output"]
    assert said["content"][0]["text"] == f"So.\n{CALL}\n"
    assert call["name"] == "sub"
    assert response["tool_choice"] == choice("auto")["tool_choice"]
    async with served(checkpoint(tmp_path / "b", PLAIN), seed=0) as service:
        forced = await answered(service, asked | choice("required") | {"parallel_tool_calls": False})
    assert [item["name"] for item in forced["output"]] == ["sub"]


SUB = {"type": "function", "name": "sub"}
IMAGE = {"type": "input_image", "image_url": "http://tiny/x.png"}


@pytest.mark.parametrize(
    ("more", "status", "param"),
    [
        ({"seed": 1}, 400, "seed"),
        ({"temperature": -1}, 400, "temperature"),
        ({"background": True}, 400, "background"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"conversation": "c"}, 400, "conversation"),
        ({"model": "other"}, 404, "model"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, 501, "input[0].content[0]"),
        ({"input": [{"type": "computer_call"}]}, 501, "input[0]"),
        ({"input": [{"role": "user", "content": "x", "y": 1}]}, 400, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, 400, "input"),
        ({"tools": [{"type": "web_search"}]}, 501, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, 400, "tools[0].name"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, 400, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [SUB]}}, 400, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [SUB]}}, 400, "tool_choice.mode"),
        ({"tool_choice": {"type": "custom", "name": "sub"}}, 400, "tool_choice.type"),
        ({"reasoning": {"effort": "high"}}, 400, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, 400, "reasoning.summary"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
        ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "schema": {"$ref": "x"}}}}, 400, "text.format.schema"),
        ({"include": ["file_search_call.results"]}, 400, "include[0]"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"top_logprobs": 2, "include": ["reasoning.encrypted_content"]}, 400, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, 400, "top_logprobs"),
    ],
)
async def test_what_does_not_act_is_refused_by_name(
    tmp_path: Path, more: dict[str, Any], status: int, param: str
) -> None:
    async with served(checkpoint(tmp_path, PLAIN)) as service:
        for streamed in (False, True):
            response = await service.post(RESPONSES, HI | more | {"stream": streamed})
            assert response.status_code == status, response.text
            assert response.json()["error"]["param"] == param
        assert not service.engine.rows


async def test_a_stream_that_fails_says_so(tmp_path: Path) -> None:
    sampler = Script({0: [*tokens_of("Hel"), ValueError("broken")]})
    async with served(checkpoint(tmp_path, THINKS_ITSELF), sampler=sampler, seed=0) as service:
        stream = await service.stream(RESPONSES, HI)
        whole = await service.post(RESPONSES, HI)
    *events, error = stream.chunks
    for event in events:
        EVENTS.validate_python(event, strict=True)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
    [item] = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hel")
    assert response["error"] == {"code": "server_error", "message": error["error"]["message"]}
    assert whole.status_code == 500
    assert whole.json() == error
