"""What the tests about tools and reasoning share: scripts, requests, and the two ways to have an answer.

`answered` goes through the whole server, `reply` through filter and reader alone, whatever the chunks are.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.request import FinishReason
from engine.text.filter import Markup
from engine.text.toolcalls import ToolCalls
from server.reply import AnswerPiece, CallArguments, CallBegun, CallEnded, Choice, Reader, Reading
from tests.serving import CHAT, ScriptedSampler, Served, Stream, tokens_of

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 0}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
SUB = {"type": "function", "function": {"name": "sub"}}
TOOLS = HI | {"tools": [ADD, SUB]}
# Random weights like blanks, of which JSON allows any number: a `logit_bias` that has them come to the point.
NO_BLANKS = {str(token): -100 for token in tokens_of(" \t\r\n")}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
LONG = "x, y" * 50
LONG_CALL = CALL.replace("2", json.dumps(LONG))
CUT_CALL = LONG_CALL[: LONG_CALL.index("}")]
BROKEN_CALL = LONG_CALL.replace('"}', '\\d"}')
OTHER = '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'


def script(*texts: str, choices: int = 1) -> ScriptedSampler:
    """One text for each seed."""
    return ScriptedSampler({seed: tokens_of(text) for seed, text in enumerate(texts)}, choices=choices)


def folded(stream: Stream, choice: int = 0) -> dict[str, Any]:
    """A choice as the whole answer would have it, out of the deltas of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for entry in stream.entries(choice):
        delta = entry["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls), "a call begins twice, or out of turn"
                calls.append({key: call[key] for key in ("id", "type")} | {"function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    [reason] = stream.reasons(choice)
    return {"index": choice, "message": message, "logprobs": None, "finish_reason": reason}


def nameless(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without the ids of its calls, which no two answers share."""
    ids = [call.pop("id") for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert all(ids)
    return choice


async def answered(service: Served, body: dict[str, Any]) -> dict[str, Any]:
    """The one choice of an answer, the same in both modes, and strictly what OpenAI's client knows."""
    whole = await service.answer(CHAT, body)
    stream = await service.stream(CHAT, body)
    assert stream.done
    ChatCompletion.model_validate(whole, strict=True)
    for chunk in stream.chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    [choice] = whole["choices"]
    assert nameless(folded(stream)) == nameless(choice)
    return choice


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def reply(
    markup: Markup, tool_calls: ToolCalls, chunks: Sequence[str], **how: Any
) -> tuple[str, str, list[tuple[str, str]], str]:
    """What is said, thought and called in a reply, and why it ended; `how` is as in `pieces`."""
    choice = Choice()
    for piece in pieces(markup, tool_calls, chunks, **how):
        choice.add(piece)
    return choice.text, choice.reasoning, [(call.name, call.arguments) for call in choice.calls], choice.reason


def pieces(
    markup: Markup,
    tool_calls: ToolCalls,
    chunks: Sequence[str],
    *,
    tools: Sequence[dict[str, Any]] = (ADD, SUB),
    reason: FinishReason = "stop",
    parallel: bool = True,
) -> list[AnswerPiece]:
    """The pieces of a reply that comes in `chunks`; each call is checked to end once, and to be JSON if whole."""
    filter_, reader = markup.filter(), Reader(0, Reading(tool_calls, tools, parallel))
    found = [piece for chunk in chunks for piece in reader.pieces(filter_.feed(chunk))]
    found += reader.pieces(filter_.finish(), reason)
    arguments: list[str] = []
    num_ended = 0
    for piece in found:
        match piece:
            case CallBegun(index=index):
                assert index == len(arguments) == num_ended, "a call begins within another, or out of turn"
                arguments.append("")
            case CallArguments(index=index, text=text):
                assert index == num_ended == len(arguments) - 1, "arguments of no call"
                arguments[-1] += text
            case CallEnded(index=index, is_whole=is_whole):
                assert index == num_ended == len(arguments) - 1, "a call ends that has not begun"
                num_ended += 1
                assert is_object(arguments[-1]) == is_whole
    assert num_ended == len(arguments), "a call does not end"
    return found


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def chunkings(text: str, most_cuts: int = 1) -> Iterator[list[str]]:
    """The text in pieces of each size up to eight, and cut at every choice of a few places."""
    places = [tuple(range(size, len(text), size)) for size in range(1, 9)]
    for num_cuts in range(most_cuts + 1):
        places += itertools.combinations(range(1, len(text)), num_cuts)
    for cuts in places:
        yield [text[i:j] for i, j in itertools.pairwise((0, *cuts, len(text)))]
