"""What an answer is to look like, in OpenAI's fields and llama-server's, and the grammar that it is held to."""

from typing import Any, Literal

import msgspec

from engine.errors import RequestError
from engine.request import Grammar
from server.validate import Name


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """`strict` changes nothing: a schema is always kept to, or refused."""

    schema: dict[str, Any]
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`schema` beside json_object or json_schema is llama-server's way to say it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


def grammar_of(response_format: ResponseFormat | None, grammar: str | None, regex: str | None) -> Grammar | None:
    """What an answer has to look like, by whichever field says it. Raises RequestError where two do."""
    found = []
    if response_format is not None and (asked := _json_grammar(response_format)) is not None:
        found.append(asked)
    if grammar is not None:
        found.append(Grammar("cfg", grammar, param="grammar"))
    if regex is not None:
        found.append(Grammar("regex", regex, param="regex"))
    if len(found) > 1:
        named = " and ".join(one.param.partition(".")[0] for one in found)
        raise RequestError(f"{named}: an answer is held to one of them", param=found[1].param)
    return found[0] if found else None


def _json_grammar(asked: ResponseFormat) -> Grammar | None:
    where = "response_format"
    if asked.json_schema is not None and (asked.type != "json_schema" or asked.schema is not None):
        raise RequestError(f"{where}: json_schema belongs to the type json_schema, alone", param=where)
    if asked.type == "text":
        if asked.schema is not None:
            raise RequestError(f"{where}: a text has no schema", param=where)
        return None
    if asked.json_schema is not None:
        schema, where = asked.json_schema.schema, f"{where}.json_schema.schema"
    elif asked.schema is not None:
        schema, where = asked.schema, f"{where}.schema"
    elif asked.type == "json_schema":
        raise RequestError(f"{where}.json_schema is missing", param=f"{where}.json_schema")
    else:
        schema = {"type": "object"}
    return schema_grammar(schema, param=where)


def schema_grammar(schema: dict[str, Any], *, param: str) -> Grammar:
    """Has an answer be JSON that fits `schema`."""
    return Grammar("json", msgspec.json.encode(schema).decode(), param=param)
