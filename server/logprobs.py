"""Logprobs in OpenAI's two shapes: a list of tokens for chat, four lists side by side for completions.

A token that is no whole characters is written by its bytes. Knows no routes.
"""

from collections.abc import Callable, Sequence
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

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = spell(token)
        return {"token": _text(spelled), "logprob": logprob, "bytes": list(spelled)}

    content = [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]} for one in tokens
    ]
    return {"content": content, "refusal": None}


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
