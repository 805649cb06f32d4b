"""Responses that a later request may go on from, or ask for: bounded, and gone with the server.

Each is kept with the whole conversation that it ends, so that none needs another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from server.errors import UnknownResponse
from server.kept import Kept

MAX_BYTES = 64 << 20
MAX_RESPONSES = 1024
MAX_SHOWN = 100

Item = dict[str, Any]


class Responses:
    """For one thread."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES) -> None:
        self._kept: Kept[str, tuple[bytes, bytes]] = Kept(max_bytes=max_bytes, max_entries=max_responses)

    def keep(self, response: Mapping[str, Any], conversation: Sequence[Item]) -> None:
        """`conversation` are all items, those of the response the last."""
        encoded = msgspec.json.encode(response), msgspec.json.encode(conversation)
        self._kept.put(response["id"], encoded, sum(map(len, encoded)))

    def conversation(self, own: str, *, param: str = "") -> list[Item]:
        """Raises UnknownResponse."""
        items: list[Item] = msgspec.json.decode(self._found(own, param)[1])
        return items

    def response(self, own: str) -> dict[str, Any]:
        """Raises UnknownResponse."""
        response: dict[str, Any] = msgspec.json.decode(self._found(own, "")[0])
        return response

    def forget(self, own: str) -> None:
        """Raises UnknownResponse."""
        if not self._kept.drop(own):
            raise _unknown(own, "")

    def _found(self, own: str, param: str) -> tuple[bytes, bytes]:
        found = self._kept.get(own)
        if found is None:
            raise _unknown(own, param)
        return found


def _unknown(own: str, param: str) -> UnknownResponse:
    return UnknownResponse(f"no response {own[:MAX_SHOWN]!r} is kept here, or no longer", param=param)
