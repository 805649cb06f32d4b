"""Logprobs in the shapes of the dialects: lists of tokens, or for OpenAI's completions four lists side by side.

A token that is no whole characters is written by its bytes. Knows no routes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import TokenLogprob

Spell = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Those of the tokens whose text the next piece of the same choice releases."""

    choice: int
    tokens: tuple[TokenLogprob, ...]


def chat_body(tokens: Sequence[TokenLogprob], spell: Spell) -> dict[str, Any]:
    """The `logprobs` of a chat choice or of one of its chunks."""

    return {"content": listed(tokens, spell), "refusal": None}


def listed(tokens: Sequence[TokenLogprob], spell: Spell, *, with_ids: bool = False) -> list[dict[str, Any]]:
    """One entry for each token, with those that were likely in its place; `with_ids`: as llama-server has them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = spell(token)
        own = {"id": token} if with_ids else {}
        return {**own, "token": _text(spelled), "logprob": logprob, "bytes": list(spelled)}

    return [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]} for one in tokens
    ]


def without_bytes(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries of `listed` as events of OpenAI's Responses have them."""

    def spelled(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {name: entry[name] for name in ("token", "logprob")}

    return [
        {**spelled(entry), "top_logprobs": [spelled(top) for top in entry["top_logprobs"]]} for entry in entries
    ]


def completion_body(tokens: Sequence[TokenLogprob], spell: Spell) -> dict[str, Any]:
    """The `logprobs` of a raw completion or of one of its chunks.

    The token itself is always among the likely ones, so that there may be one more than were asked for. Offsets
    count the characters of the answer.
    """

    def text(token: int) -> str:
        return _text(spell(token), prefix="bytes:")

    return {
        "tokens": [text(one.token) for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [
            {text(token): logprob for token, logprob in (*reversed(one.top), (one.token, one.logprob))}
            for one in tokens
        ],
        "text_offset": [one.offset for one in tokens],
    }


def _text(spelled: bytes, prefix: str = "") -> str:
    """The text of a token; where its bytes are no whole characters, those in hexadecimal."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in spelled)
