"""The reasoning of answers, kept for when their conversation comes back without it.

Clients send back what was said and not what was thought. Where the prompt would then differ from what the model
has read and written, nothing behind that turn can be reused, so the exact reasoning is put back: only where the
turn, all messages before it and the scope (model, template, salt) are those of the answer. What a client sends
itself holds.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from engine.text.template import text_of
from server.kept import Kept

MAX_BYTES = 16 << 20
MAX_ENTRIES = 4096
MAX_SHARE = 8  # no entry takes more than this part of the bytes
THOUGHTS = ("reasoning_content", "reasoning")

Message = Mapping[str, Any]


class Echo:
    """A bounded store. For one thread."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES) -> None:
        self._largest_bytes = max_bytes // MAX_SHARE
        self._kept: Kept[bytes, str] = Kept(max_bytes=max_bytes, max_entries=max_entries)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def keep(self, scope: Sequence[str], messages: Sequence[Message], answer: str, reasoning: str) -> None:
        """Keep the reasoning of the plain `answer` to `messages`."""
        *_, key = _keys(scope, [*messages, {"role": "assistant", "content": answer}])
        num_bytes = _bytes_of(reasoning)
        if reasoning and num_bytes <= self._largest_bytes:
            self._kept.put(key, reasoning, num_bytes)

    def filled(self, scope: Sequence[str], messages: Sequence[Message]) -> list[Message]:
        """`messages` with the reasoning of those that were answered here and came back without."""
        filled: list[Message] = list(messages)
        if not len(self._kept):
            return filled
        for index, key in enumerate(_keys(scope, messages)):
            if key in self._kept and _is_plain(messages[index]):
                filled[index] = {**messages[index], "reasoning_content": self._kept.get(key)}
        return filled


def _bytes_of(reasoning: str) -> int:
    return len(reasoning.encode("utf-8", "surrogatepass"))


def _is_plain(message: Message) -> bool:
    """An assistant's turn that has content and nothing else."""
    return message["role"] == "assistant" and not any(message.get(name) for name in ("tool_calls", *THOUGHTS))


def _keys(scope: Sequence[str], messages: Sequence[Message]) -> Iterator[bytes]:
    """For each message what it is kept by: all before it, and what it says, but not what was thought."""
    before = hashlib.blake2b(msgspec.json.encode(list(scope)), digest_size=32)
    for message in messages:
        said = {name: value for name, value in message.items() if value is not None and name not in THOUGHTS}
        said["content"] = text_of(message.get("content")).strip()
        before.update(msgspec.json.encode(said, order="deterministic"))
        yield before.digest()
