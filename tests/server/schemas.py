"""Random JSON schemas, the same for every run: what clients send, and what they had better not. And what comes of
them: each is refused by name, or an answer that ends by itself is valid.
"""

import asyncio
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema

from tests.serving import CHAT, Served

Schema = dict[str, Any]
NAMES = ("name", "age", "kind", "a b", "ключ", 'quote"d', "")
WORDS = ("red", "green", "blue", "é", 'a"b', "", 3, -1, 2.5, True, None)
PATTERNS = ("^[a-z]{2,5}$", "[0-9]+", "^(ab|cd)*$", r"^\d{3}-\d{4}$", "x")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "unheard-of")


@dataclass(frozen=True)
class Outcome:
    """How the answer to one schema ended: by its `stop`, by the bound (`length`), or the schema was `refused`."""

    reason: str
    num_tokens: int = 0


async def outcomes(
    service: Served, path: str, body: Mapping[str, Any], numbers: Iterable[int], at_once: int
) -> list[Outcome]:
    """What comes of the schemas of these numbers, so many of them at a time."""
    turns = asyncio.Semaphore(at_once)

    async def one(number: int) -> Outcome:
        async with turns:
            return await _outcome(service, path, body, number)

    return await asyncio.gather(*map(one, numbers))


async def _outcome(service: Served, path: str, body: Mapping[str, Any], number: int) -> Outcome:
    schema = random_schema(number)
    asked = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}}
    answer = await service.post(path, {**body, "seed": number, "response_format": asked})
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"] == "response_format.json_schema.schema", (schema, error)
        return Outcome("refused")
    assert answer.status_code == 200, (schema, answer.text)
    told = answer.json()
    [choice] = told["choices"]
    num_tokens = told["usage"]["completion_tokens"]
    if choice["finish_reason"] == "stop":
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        try:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError) as fault:
            raise AssertionError(f"schema {number}, {schema}: {text!r}") from fault
    else:
        assert choice["finish_reason"] == "length", (schema, choice)
        assert num_tokens == body["max_tokens"], (schema, told)
    return Outcome(choice["finish_reason"], num_tokens)


def random_schema(seed: int) -> Schema:
    """The schema of this number: at most three levels deep, some with definitions that refer to each other."""
    choose = random.Random(seed)
    schema = _any(choose, 3)
    if "#/$defs/" in str(schema):
        schema["$defs"] = {name: _any(choose, 1) for name in ("p", "q")}
    return schema


def _any(choose: random.Random, depth: int) -> Schema:
    makers = [_string, _integer, _number, _plain, _enum]
    if depth:
        makers += [_object, _object, _object, _array, _array, _union, _rare]
        if depth < 3:
            makers.append(_reference)
    return choose.choice(makers)(choose, depth - 1)


def _some(choose: random.Random, **optional: Any) -> Schema:
    """A few of the keywords, each with what its maker gives."""
    return {name: make() for name, make in optional.items() if choose.random() < 0.4}


def _object(choose: random.Random, depth: int) -> Schema:
    names = choose.sample(NAMES, choose.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _any(choose, depth) for name in names},
        "required": [name for name in names if choose.random() < 0.7],
        "additionalProperties": choose.choice([False, False, False, True, {"type": "integer"}]),
    }


def _array(choose: random.Random, depth: int) -> Schema:
    least = choose.randint(0, 2)
    schema = {"type": "array", "items": _any(choose, depth), "maxItems": least + choose.randint(0, 3)}
    return schema | _some(
        choose, minItems=lambda: least, prefixItems=lambda: [_any(choose, 0) for _ in range(choose.randint(1, 2))]
    )


def _string(choose: random.Random, depth: int) -> Schema:
    least = choose.randint(0, 5)
    bounds = {"minLength": least, "maxLength": least + choose.randint(0, 9)}
    return {"type": "string"} | choose.choice(
        [bounds, bounds, {"pattern": choose.choice(PATTERNS)}, {"format": choose.choice(FORMATS)}, {}]
    )


def _integer(choose: random.Random, depth: int) -> Schema:
    least = choose.randint(-1000, 1000)
    return {"type": "integer"} | _some(
        choose,
        minimum=lambda: least,
        exclusiveMaximum=lambda: least + choose.randint(1, 300),
        multipleOf=lambda: choose.choice([1, 2, 5, 7, 100]),
    )


def _number(choose: random.Random, depth: int) -> Schema:
    least = round(choose.uniform(-10, 10), 2)
    return {"type": "number"} | _some(
        choose, exclusiveMinimum=lambda: least, maximum=lambda: round(least + choose.uniform(0.5, 30), 3)
    )


def _plain(choose: random.Random, depth: int) -> Schema:
    return choose.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {}])


def _enum(choose: random.Random, depth: int) -> Schema:
    return choose.choice([{"enum": choose.sample(WORDS, choose.randint(1, 5))}, {"const": choose.choice(WORDS)}])


def _union(choose: random.Random, depth: int) -> Schema:
    word = choose.choice(["anyOf", "anyOf", "oneOf", "allOf"])
    return {word: [_any(choose, depth) for _ in range(choose.randint(1, 3))]}


def _reference(choose: random.Random, depth: int) -> Schema:
    return {"$ref": f"#/$defs/{choose.choice('pq')}"}


def _rare(choose: random.Random, depth: int) -> Schema:
    """What is kept to in part only by whoever is careless."""
    return choose.choice(
        [
            {"not": _any(choose, 0)},
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            {"type": "object", "patternProperties": {"^x": _any(choose, 0)}, "additionalProperties": False},
            {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "null"}},
            {"type": "object", "propertyNames": {"maxLength": 3}},
            {"type": "object", "dependentRequired": {"a": ["b"]}},
            {"type": "array", "contains": {"type": "null"}, "maxItems": 2},
            {"if": {"type": "string"}, "then": {"minLength": 2}},
            {"type": "integer", "minimum": 9, "maximum": 3},
        ]
    )
