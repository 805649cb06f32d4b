"""The bytes that single tokens stand for, of which a decoder shows only whole characters.

The tokenizer is given: this module imports none. Bytes of neighbouring tokens put together are their text, but for
what a decoder strips or adds at its beginning.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece names a byte
_SPACE = "\u2581"  # and a space


def spelling_of(tokenizer: Any) -> Callable[[int], bytes]:
    """The function from token ids to their bytes, of a tokenizer of transformers. Unknown ids have none."""
    written = {int(token) for token in getattr(tokenizer, "added_tokens_decoder", {})}
    is_byte_level = _is_byte_level(tokenizer)
    bytes_of = _bytes_of_letters()

    @functools.lru_cache(maxsize=4096)
    def spell(token: int) -> bytes:
        name: str | None = tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token in written:
            return name.encode()
        if is_byte_level:
            spelled = [bytes_of.get(letter) for letter in name]
            return name.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace(_SPACE, " ").encode()

    return spell


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether tokens are named by one letter for each byte, as GPT-2's are."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and "ByteLevel" in repr(decoder.__getstate__())


def _bytes_of_letters() -> dict[str, int]:
    """GPT-2's letters: bytes that print are written as themselves, the others by letters from 256 on, in order."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + i): byte for i, byte in enumerate(others)}
