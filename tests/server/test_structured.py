"""Structured output over HTTP: what each field does, in every way it can be sent, and what is refused."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.request import Grammar
from server.chat import ChatBody
from server.validate import parse
from tests.serving import CHAT, COMPLETIONS, Served, served, settle, tokens_of

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["ok", "word"],
    "properties": {"ok": {"type": "boolean"}, "word": {"type": "string", "maxLength": 6}},
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": SCHEMA}}
CHATTING = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETING = {"prompt": "hi"}
SAID = {CHAT: CHATTING, COMPLETIONS: COMPLETING}
# The tiny model's text is noise: at temperature 1 what may end comes to an end.
DRAWN = {"temperature": 1.0, "max_tokens": 200}


def text_of(path: str, entry: dict[str, Any]) -> str:
    text: str = entry["message"]["content"] if path == CHAT else entry["text"]
    return text


async def answers(service: Served, path: str, **fields: Any) -> list[tuple[str, str]]:
    """Text and reason of each choice, which the stream has to say alike."""
    body = SAID[path] | DRAWN | {"seed": 5} | fields
    whole = await service.answer(path, body)
    found = [(text_of(path, entry), entry["finish_reason"]) for entry in whole["choices"]]
    stream = await service.stream(path, body)
    assert not stream.errors
    assert [(stream.text(i), stream.reasons(i)) for i in range(len(found))] == [(t, [r]) for t, r in found]
    return found


@pytest.mark.parametrize("path", SAID)
async def test_a_schema_is_kept_to(tiny: Path, path: str) -> None:
    async with served(tiny) as service:
        found = await answers(service, path, response_format=BY_SCHEMA, n=4)
        assert len({text for text, _ in found}) > 1
        for text, reason in found:
            assert reason == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("path", SAID)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"grammar": 'root ::= "yes"'}, "yes"),
        ({"grammar": 'start: "no"'}, "no"),
        ({"regex": "^maybe$"}, "maybe"),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, "1"),
        ({"response_format": {"type": "json_schema", "schema": {"enum": ["a"]}}}, '"a"'),
    ],
    ids=str,
)
async def test_every_field_acts(tiny: Path, path: str, fields: dict[str, Any], expected: str) -> None:
    async with served(tiny) as service:
        assert await answers(service, path, **fields) == [(expected, "stop")]
        assert await answers(service, path, **fields, temperature=0) == [(expected, "stop")]


async def test_what_asks_for_nothing_changes_nothing(tiny: Path) -> None:
    async with served(tiny) as service:
        [plain] = await answers(service, CHAT, max_tokens=9)
        for nothing in (
            {"response_format": {"type": "text"}},
            {"response_format": None, "grammar": None, "regex": None},
        ):
            assert await answers(service, CHAT, max_tokens=9, **nothing) == [plain]


async def test_json_object_is_any_object(tiny: Path) -> None:
    async with served(tiny) as service:
        quote = str(tokens_of('"')[0])
        for text, reason in await answers(
            service, CHAT, response_format={"type": "json_object"}, logit_bias={quote: 6}, n=4
        ):
            assert text.startswith("{")
            if reason == "stop":
                assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
async def test_the_bound_on_tokens_is_a_length_and_a_whole_answer_is_none(tiny: Path, max_tokens: int) -> None:
    """An answer that is whole with its last allowed token ends by itself."""
    async with served(tiny) as service:
        [(text, reason)] = await answers(service, CHAT, regex="abc", max_tokens=max_tokens)
        assert text == "abc"[:max_tokens]
        assert reason == ("length" if max_tokens < 3 else "stop")


async def test_stop_strings_end_a_constrained_answer(tiny: Path) -> None:
    async with served(tiny) as service:
        assert await answers(service, CHAT, regex="abcdef", stop=["cd"]) == [("ab", "stop")]
        assert await answers(service, CHAT, regex="abcdef", stop=["ef", "x"]) == [("abcd", "stop")]


async def test_constrained_and_free_answers_share_a_batch(tiny: Path) -> None:
    asked: list[dict[str, Any]] = [
        {}, {"response_format": BY_SCHEMA}, {"regex": "[a-z ]{20}"}, {"grammar": 'root ::= "x"{1,30}'},
    ]  # fmt: skip
    bodies = [COMPLETING | DRAWN | {"seed": i, "max_tokens": 40} | fields for i, fields in enumerate(asked)]
    async with served(tiny, parallel=4) as service:
        alone = [(await service.answer(COMPLETIONS, body))["choices"] for body in bodies]
        together = await asyncio.gather(*(service.answer(COMPLETIONS, body) for body in bodies))
        assert [answer["choices"] for answer in together] == alone
        assert max(len(tick.decode) for tick in service.engine.ticks) > 1


@pytest.mark.parametrize("path", SAID)
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": BY_SCHEMA, "regex": "a"}, "regex", "one of them"),
        ({"grammar": 'root ::= "a"', "regex": "a"}, "regex", "one of them"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "r"}}},
         "response_format.json_schema", "schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
         "response_format", "json_schema"),
        ({"response_format": {"type": "json_object", "strictly": 1}}, "response_format", "strictly"),
        ({"response_format": "json"}, "response_format", "str"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
         "response_format.json_schema.schema", "Unimplemented"),
        ({"response_format": {"type": "json_object", "schema": {"$ref": "http://a.invalid"}}},
         "response_format.schema", "fetch"),
        ({"grammar": "root ::= ("}, "grammar", "grammar"),
        ({"grammar": 7}, "grammar", "int"),
        ({"regex": "("}, "regex", "unclosed"),
        ({"regex": "x" * 70_000}, "regex", "bytes"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
async def test_what_cannot_be_kept_to_is_refused(
    tiny: Path, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    async with served(tiny) as service:
        for stream in (False, True):
            answer = await service.post(path, SAID[path] | fields | {"stream": stream})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"].startswith(param)
            assert said in error["message"]
        assert not service.engine.rows


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    properties = {name: {"type": "null"} for name in "zayb"}
    body = CHATTING | {"response_format": {"type": "json_object", "schema": {"properties": properties}}}
    grammar = parse(json.dumps(body).encode(), ChatBody).constraint()
    assert grammar is not None
    assert list(json.loads(grammar.text)["properties"]) == list("zayb")


async def test_a_grammar_is_compiled_off_the_engines_thread(tiny: Path) -> None:
    async with served(tiny) as service:
        grammars, threads = service.engine.language.grammars, []
        compiled = grammars._compiled

        def noted(grammar: Grammar) -> Any:
            threads.append(threading.get_ident())
            return compiled(grammar)

        grammars._compiled = noted  # type: ignore[method-assign]
        await asyncio.gather(*(service.answer(CHAT, CHATTING | {"regex": f"a{{{i}}}"}) for i in (1, 2, 3)))
        assert len(threads) == 3
        assert service.engine.loaded_on not in threads


async def test_a_verified_hit_is_drawn_under_its_grammar(tiny: Path) -> None:
    body = {"prompt": "x" * 40, "temperature": 0, "max_tokens": 8, "regex": "[q-z]{8}"}
    async with served(tiny, verify_cache=1.0) as service:
        first, second = [(await service.answer(COMPLETIONS, body))["choices"] for _ in range(2)]
        assert first == second
        await asyncio.to_thread(settle, service.loop)
        stats = await service.app.state.service.models.default.bridge.cache_stats()
        assert stats.verify_checked == 1
        assert stats.verify_different == 0
