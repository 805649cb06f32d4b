"""Calls as they come: arguments are told while they are written, whatever the chunks are, and nothing is lost."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import FinishReason
from engine.text.callstream import READ_FIRST
from engine.text.filter import THINK, Markup
from engine.text.toolcalls import ToolCalls
from server.reply import AnswerPiece, CallArguments, CallBegun, CallEnded, Finish, Reasoning, Text
from tests.engine.text.markups import (
    FAMILIES,
    JSON_WAYS,
    LONG,
    TOOL,
    long_call,
    markup_of,
    tool_calls_of,
    words_of,
)
from tests.replies import CALL, is_object, pieces, reply

PLAIN = Markup(THINK, (("<tool_call>", "</tool_call>"),))
LONG_ONE = {"a": 2, "b": LONG}


def joined(found: Sequence[AnswerPiece]) -> list[AnswerPiece]:
    """The pieces without the chunks in which they came, and without ids that were made."""
    told: list[AnswerPiece] = []
    for piece in found:
        last = told[-1] if told else None
        match piece, last:
            case (Text(), Text()) | (Reasoning(), Reasoning()) | (CallArguments(), CallArguments()):
                told[-1] = replace(last, text=last.text + piece.text)  # type: ignore[type-var, union-attr]
            case CallBegun(id=own), _ if ":" not in own:
                told.append(replace(piece, id=""))  # type: ignore[type-var]
            case _:
                told.append(piece)
    return told


def said(text: str, *, reason: FinishReason = "stop", name: str = "written out", **more: Any) -> Any:
    """What `reply` tells of a text, the same in several chunkings."""
    calls, markup = tool_calls_of(name), markup_of(name)
    more = {"tools": [TOOL], **more}
    results = [
        reply(markup, calls, chunks, reason=reason, **more)
        for chunks in ([text], list(text), [text[:50], text[50:]], [text[:-1], text[-1:]])
    ]
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None)
@given(data=st.data())
def test_any_text_in_any_chunking_is_told_alike(name: str, data: st.DataObject) -> None:
    words = st.one_of(st.sampled_from([*words_of(name), long_call(name)]), st.text(max_size=4))
    text = "".join(data.draw(st.lists(words, max_size=8)))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    parallel = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    markup, calls = markup_of(name, data.draw(st.sampled_from([None, THINK]))), tool_calls_of(name)

    def told(chunks: Sequence[str]) -> list[AnswerPiece]:
        return joined(pieces(markup, calls, chunks, tools=[TOOL], reason=reason, parallel=parallel))

    whole = told([text])
    assert told([text[i:j] for i, j in itertools.pairwise((0, *cuts, len(text)))]) == whole
    assert told(list(text)) == whole
    begun = [piece for piece in whole if isinstance(piece, CallBegun)]
    assert len(begun) <= 1 or parallel
    ended = [piece.is_whole for piece in whole if isinstance(piece, CallEnded)]
    assert whole[-1] == Finish(0, "tool_calls" if reason == "stop" and any(ended) else reason)


@pytest.mark.parametrize("name", JSON_WAYS)
def test_arguments_come_while_they_are_written(name: str) -> None:
    text = long_call(name)
    found = pieces(markup_of(name), tool_calls_of(name), list(text), tools=[TOOL])
    arguments = [piece.text for piece in found if isinstance(piece, CallArguments)]
    assert json.loads("".join(arguments)) == LONG_ONE
    assert "".join(arguments) in text, "the model's own text"
    assert len(arguments) > len("".join(arguments)) - READ_FIRST - 2
    assert [piece for piece in found if isinstance(piece, Text)] == []
    assert found[-1] == Finish(0, "tool_calls")


@pytest.mark.parametrize("name", JSON_WAYS)
def test_a_short_call_is_read_first(name: str) -> None:
    found = pieces(markup_of(name), tool_calls_of(name), list(FAMILIES[name].call), tools=[TOOL])
    assert [type(piece) for piece in found] == [CallBegun, CallArguments, CallEnded, Finish]


@pytest.mark.parametrize("name", JSON_WAYS)
def test_what_breaks_is_told_as_far_as_it_was_understood_and_the_rest_is_text(name: str) -> None:
    text = long_call(name)
    end = next((tag for tag in ("<|call|>", markup_of(name).calls[0][1]) if tag and text.endswith(tag)), "")
    start = text.index('{"a"')
    for at in range(start + 1, len(text) - len(end) - 1):
        answer, _, called, reason = said(f"{text[:at]}\x01{text[at:]}", name=name)
        assert reason in ("stop", "tool_calls")
        if not called:
            assert at - start <= READ_FIRST or reason == "stop"
            assert answer == f"{text[:at]}\x01{text[at:]}"
            continue
        [(_, arguments)] = called
        if is_object(arguments):
            assert reason == "tool_calls"
            continue
        assert reason == "stop"
        rest = f"{text[:at]}\x01{text[at:]}"[start:]
        assert arguments + answer in (rest, rest.removesuffix(end)), (at, arguments, answer)
        assert len(arguments) > READ_FIRST


@pytest.mark.parametrize("name", JSON_WAYS)
@pytest.mark.parametrize("text_of", [long_call, lambda name: FAMILIES[name].call], ids=["long", "short"])
def test_what_a_bound_cuts_is_a_call_as_far_as_it_came(name: str, text_of: Any) -> None:
    text = text_of(name)
    whole = next(n for n in range(len(text), 0, -1) if is_object(text[text.index('{"a"') : n]))
    for length in range(text.index('{"a"') + 1, len(text)):
        answer, _, called, reason = said(text[:length], name=name, reason="length")
        arguments = text[text.index('{"a"') : min(length, whole)]
        assert (answer, called, reason) == ("", [("add", arguments)], "length")
    for length in range(1, text.index('{"a"') + 1):
        answer, _, called, reason = said(text[:length], name=name, reason="length")
        assert (called, reason) == ([], "length")
        assert answer in (text[:length], ""), "a broken header of Harmony's is markup"


@pytest.mark.parametrize("name", JSON_WAYS)
def test_what_a_model_leaves_open_is_no_whole_call(name: str) -> None:
    text = long_call(name)
    length = text.index("é") + 80
    answer, _, called, reason = said(text[:length], name=name)
    [(_, arguments)] = called
    assert (answer, arguments, reason) == ("", text[text.index('{"a"') : length], "stop")


def call(arguments: str, more: str = "") -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}{more}}}\n</tool_call>'


LONG_TEXT = json.dumps(LONG_ONE)


@pytest.mark.parametrize(
    ("text", "told", "answer"),
    [
        (call(LONG_TEXT, ', "x": 1'), LONG_TEXT, ""),
        (call(LONG_TEXT, ', "arguments": {}'), LONG_TEXT[:-1], '}, "arguments": {}}\n'),
        (call(LONG_TEXT, ', "name": "sub"'), LONG_TEXT[:-1], '}, "name": "sub"}\n'),
        (call(LONG_TEXT, " and"), LONG_TEXT[:-1], "} and}\n"),
        (call(LONG_TEXT) + " behind", LONG_TEXT, "behind"),
        (call(LONG_TEXT.replace("2", "1e999")), LONG_TEXT.replace("2", "1e999")[:-1], "}}\n"),
        (call(LONG_TEXT.replace('"a"', '"b"')), LONG_TEXT.replace('"a"', '"b"'), ""),
    ],
)
def test_what_is_behind_the_arguments_counts(text: str, told: str, answer: str) -> None:
    found, _, called, reason = said(text)
    assert (found, called) == (answer, [("add", told)])
    assert reason == ("tool_calls" if is_object(told) else "stop")


@pytest.mark.parametrize(
    "text",
    [
        call(json.dumps(LONG_TEXT)),
        call(f"[{LONG_TEXT}]"),
        f'<tool_call>{{"arguments": {LONG_TEXT}, "name": "add"}}</tool_call>',
        f'<tool_call>{{"id": "x", "name": "add", "arguments": {LONG_TEXT}}}</tool_call>',
        call(LONG_TEXT).replace("add", "a\\u0064d"),
        call(LONG_TEXT).replace("add", "divide"),
    ],
)
def test_what_is_written_otherwise_is_read_when_it_is_whole(text: str) -> None:
    found = pieces(markup_of("written out"), tool_calls_of("written out"), list(text), tools=[TOOL])
    assert len(found) <= 5, "all at once"
    answer, _, called, _ = said(text)
    assert [json.loads(arguments) for _, arguments in called] == ([LONG_ONE] if not answer else [])
    assert answer in ("", text)


@pytest.mark.parametrize("name", ["mistral", "kimi_k2", "kimi_k3"])
@pytest.mark.parametrize("text_of", [long_call, lambda name: FAMILIES[name].call], ids=["long", "short"])
def test_calls_between_the_same_tags_are_told_one_by_one(name: str, text_of: Any) -> None:
    text = text_of(name)
    start, end = markup_of(name).calls[0]
    inner = text.removeprefix(start).removesuffix(end)
    both = f"{start}{inner}{inner}{end}"
    answer, _, called, reason = said(both, name=name)
    assert [one for one, _ in called] == ["add", "add"]
    assert all(is_object(arguments) for _, arguments in called)
    assert (answer, reason) == ("", "tool_calls")
    alone = said(both, name=name, parallel=False)
    assert (alone[0], alone[2]) == ("", called[:1])
    answer, _, called, reason = said(f"{start}{inner} so {inner}{end}", name=name, tools=[])
    assert (called, answer) == ([], f"{start}{inner} so {inner}{end}")
    answer, _, called, reason = said(f"{start}{inner} so it is{end}", name=name)
    assert (len(called), answer, reason) == (1, " so it is", "tool_calls")


def test_a_models_own_id_is_announced() -> None:
    found = pieces(markup_of("kimi_k2"), tool_calls_of("kimi_k2"), list(long_call("kimi_k2")), tools=[TOOL])
    assert found[0] == CallBegun(0, 0, "functions.add:0", "add")


def test_a_second_call_that_was_cut_is_dropped_where_one_is_wanted() -> None:
    second = CALL[:-20]
    answer, _, called, reason = reply(PLAIN, ToolCalls(PLAIN), [CALL + second], reason="length", parallel=False)
    assert (answer, called, reason) == ("", [("add", '{"a": 2}')], "length")


def test_a_forced_call_is_told_as_it_comes() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": ' + LONG_TEXT + "}\n</tool_call>"
    found = pieces(PLAIN, ToolCalls(PLAIN), list(text))
    assert sum(isinstance(piece, CallArguments) for piece in found) > len(LONG_TEXT) - READ_FIRST - 2


def test_a_long_opening_begins_no_stream() -> None:
    text = f'<tool_call>{" " * 2000}{{"name": "add", "arguments": {LONG_TEXT}}}</tool_call>'
    found = pieces(PLAIN, ToolCalls(PLAIN), list(text))
    kinds = [type(piece) for piece in found]
    assert (kinds[0], *kinds[-2:]) == (CallBegun, CallEnded, Finish)
    assert len(kinds) < 8
