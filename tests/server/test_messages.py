"""Anthropic's Messages: what a body becomes, and that a folded stream is the whole message."""

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.replies import CALL, CUT_CALL, LONG, LONG_CALL, OTHER
from tests.serving import MESSAGES, Served, WatchedEngine, served, tokens_of
from tests.serving import ScriptedSampler as Script
from tests.templates import PLAIN, THINKING, THINKS_ITSELF, checkpoint

pytestmark = pytest.mark.anyio

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
TOOLS = [
    {
        "name": "add",
        "description": "adds",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
    {"name": "sub", "input_schema": {"type": "object"}},
]
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def script(text: str) -> Script:
    return Script({0: tokens_of(text)})


def prompt_of(engine: WatchedEngine) -> str:
    return str(engine.language.tokens.decode(engine.rows[-1].request.prompt))


async def answered(service: Served, body: dict[str, Any]) -> dict[str, Any]:
    """The message, the same in both modes, and strictly what Anthropic's client knows."""
    whole = await service.answer(MESSAGES, body)
    Message.model_validate(whole, strict=True)
    stream = await service.stream(MESSAGES, body)
    message, buffers = None, dict[int, bytes]()
    assert [event["type"] for event in stream.chunks][:2] == ["message_start", "ping"]
    for event in (event for event in stream.chunks if event["type"] != "ping"):  # which the client drops
        parsed = EVENTS.validate_python(event, strict=True)
        message = accumulate_event(event=parsed, current_snapshot=message, json_bufs=buffers)
    assert [event["type"] for event in stream.chunks][-2:] == ["message_delta", "message_stop"]
    assert not stream.done
    assert message is not None
    folded = message.to_dict()
    assert nameless(folded) == nameless(whole)
    return whole


def nameless(message: dict[str, Any]) -> dict[str, Any]:
    """Without ids, which no two answers share, and without what the prompt cache did."""
    blocks = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
    usage = message["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return message | {"id": "", "content": blocks, "usage": [read, usage["output_tokens"]]}


async def test_text_and_why_it_ended(tiny: Path) -> None:
    async with served(tiny, sampler=script("Hello there"), seed=0) as service:
        plain = await answered(service, HI)
        stopped = await answered(service, HI | {"stop_sequences": ["xy", "o t"]})
        cut = await answered(service, HI | {"max_tokens": 4})
        again = await service.answer(MESSAGES, HI)
    assert plain["content"] == [{"type": "text", "text": "Hello there"}]
    assert (plain["stop_reason"], plain["stop_sequence"]) == ("end_turn", None)
    assert stopped["content"] == [{"type": "text", "text": "Hell"}]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "o t")
    assert cut["content"] == [{"type": "text", "text": "Hell"}]
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 4)
    assert again["usage"]["cache_read_input_tokens"] > 0


async def test_thoughts_text_and_calls_are_blocks(tmp_path: Path) -> None:
    text = f"I plan.\n</think>\n\nFirst.\n{CALL}\n{OTHER}"
    async with served(checkpoint(tmp_path, THINKING), sampler=script(text), seed=0) as service:
        message = await answered(service, HI | {"tools": TOOLS})
        one = await answered(
            service,
            HI | {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        )
        none = await answered(service, HI | {"tools": TOOLS, "tool_choice": {"type": "none"}})
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    thought, said, *calls = message["content"]
    assert (thought["thinking"], said["text"]) == ("I plan.", "First.")
    assert [(call["name"], call["input"]) for call in calls] == [("add", {"a": 2}), ("sub", {})]
    assert message["stop_reason"] == "tool_use"
    assert [block["type"] for block in one["content"]] == kinds[:-1]
    assert [block["type"] for block in none["content"]] == ["thinking", "text"]
    assert none["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("text", "told", "reason"),
    [
        (LONG_CALL, {"a": LONG}, "tool_use"),
        (CUT_CALL[:-1], {}, "end_turn"),
        (LONG_CALL.replace('"a"', '"c": [1, 12], "a"').replace('"}', '\\d"}'), {"c": [1, 12]}, "end_turn"),
        (CALL.replace("2", '"\\ud800"'), {}, "tool_use"),
    ],
)
async def test_what_is_whole_of_a_call_is_its_input(
    tmp_path: Path, text: str, told: dict[str, Any], reason: str
) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(text), seed=0) as service:
        asked = HI | {"tools": TOOLS, "max_tokens": 400}
        message = await (service.answer(MESSAGES, asked) if "ud800" in text else answered(service, asked))
    assert (message["content"][0]["input"], message["stop_reason"]) == (told, reason)


async def test_a_call_that_was_cut_has_the_input_that_came(tmp_path: Path) -> None:
    text = CALL.replace("2", '12, "b": "x"')
    num_tokens = len(tokens_of(text[: text.index("x")]))
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(text), seed=0) as service:
        message = await answered(service, HI | {"tools": TOOLS, "max_tokens": num_tokens})
    assert [(block["type"], block["input"]) for block in message["content"]] == [("tool_use", {"a": 12})]
    assert message["stop_reason"] == "max_tokens"


async def test_a_conversation_is_read_as_chat_reads_it(tmp_path: Path) -> None:
    conversation = {
        "system": [
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        "messages": [
            {"role": "user", "content": "add"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I add.", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]},
                    {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
            {"role": "system", "content": "BLUE"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": "go on"},
        ],
    }
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nadd<|im_end|>\n"
        '<|im_start|>assistant\n<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n'
        "</tool_call><|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>tool\nError: no<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>system\nBLUE<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )
    async with served(checkpoint(tmp_path, THINKS_ITSELF), sampler=script("Yes"), seed=0) as service:
        message = await answered(service, HI | conversation)
        assert prompt_of(service.engine) == expected
        counted = await service.answer(f"{MESSAGES}/count_tokens", conversation)
    usage = message["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_a_thought_that_does_not_come_back_is_put_back(tmp_path: Path) -> None:
    text = "I plan.\n</think>\n\nHello"
    async with served(checkpoint(tmp_path, THINKING), sampler=script(text), seed=0) as service:
        first = await service.answer(MESSAGES, HI)
        for said in (first["content"], first["content"][1:], "Hello"):
            turns = [*HI["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
            await service.answer(MESSAGES, HI | {"messages": turns})
        prompts = {row.request.prompt for row in service.engine.rows[1:]}
        assert len(prompts) == 1
        assert "I plan." in prompt_of(service.engine)
        counted = await service.answer(f"{MESSAGES}/count_tokens", {"messages": turns})
        assert counted["input_tokens"] == len(service.engine.rows[-1].request.prompt)


async def test_a_call_is_forced_and_a_thought_bounded(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["c", "f"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tools = [{"name": name, "input_schema": schema} for name in ("add", "sub")]
    asked = HI | {"tools": tools, "thinking": {"type": "enabled", "budget_tokens": 3}}
    async with served(checkpoint(tmp_path, THINKS_ITSELF), seed=0) as service:
        for choice, names in (({"type": "any"}, {"add", "sub"}), ({"type": "tool", "name": "sub"}, {"sub"})):
            message = await answered(
                service, asked | {"tool_choice": choice | {"disable_parallel_tool_use": True}, "top_k": 1}
            )
            [call] = [block for block in message["content"] if block["type"] != "thinking"]
            assert call["name"] in names
            assert call["input"]["unit"] in "cf"


async def test_an_answer_keeps_to_a_schema(tiny: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    format_ = {"type": "json_schema", "schema": schema}
    async with served(tiny, seed=0) as service:
        message = await answered(service, HI | {"output_config": {"format": format_}})
    assert json.loads(message["content"][0]["text"]) == {"a": 1}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://tiny/x.png"}}


@pytest.mark.parametrize(
    ("more", "status", "named"),
    [
        ({"seed": 1}, 400, "'seed'"),
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"model": "other"}, 404, "other"),
        ({"container": "x"}, 400, "container"),
        ({"metadata": {"who": "x"}}, 400, "who"),
        ({"stop_sequences": [""]}, 400, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 501, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, 400, "`y`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            400,
            "messages[0].content[0]",
        ),
        ({"messages": [*HI["messages"], {"role": "assistant", "content": "I "}]}, 400, "messages[1]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 501, "tools[0]"),
        ({"tools": [{"name": "add"}]}, 400, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, 400, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "thinking.budget_tokens"),
        ({"output_config": {"effort": "high"}}, 400, "output_config.effort"),
    ],
)
async def test_what_does_not_act_is_refused_by_name(
    tmp_path: Path, more: dict[str, Any], status: int, named: str
) -> None:
    async with served(checkpoint(tmp_path, PLAIN)) as service:
        for streamed in (False, True):
            response = await service.post(MESSAGES, HI | more | {"stream": streamed})
            assert response.status_code == status, response.text
            body = response.json()
            assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
            assert named in body["error"]["message"]
        assert not service.engine.rows


async def test_a_stream_that_fails_says_so_and_does_not_end(tiny: Path) -> None:
    sampler = Script({0: [*tokens_of("Hel"), ValueError("broken")]})
    async with served(tiny, sampler=sampler, seed=0) as service:
        stream = await service.stream(MESSAGES, HI)
        whole = await service.post(MESSAGES, HI)
    *_, said, failed = stream.chunks
    assert said["type"] == "content_block_delta"
    assert (failed["type"], failed["error"]["type"]) == ("error", "api_error")
    assert whole.status_code == 500
    assert whole.json() == failed
