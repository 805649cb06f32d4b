"""Token ids to text and back. The tokenizer is given: this module imports none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"  # what decoders put where bytes are not (yet) a character
PRIME_TOKENS = 6
MAX_HELD_TOKENS = 8  # more than the bytes of any character: what is still no text by then never will be


@dataclass(frozen=True, slots=True)
class Tokens:
    """A model's tokenizer as two functions. Both are called from several threads.

    `encode(text, add_special)` puts a beginning-of-sequence token before the text only if `add_special`;
    `decode` shows special tokens as they are written. No token stands for more than `longest_bytes` of text.
    `bos` and `eos` are the texts of the tokens that begin and end a sequence, empty where there is none. `spell`
    gives a token's bytes.
    """

    encode: Callable[[str, bool], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    longest_bytes: int
    spell: Callable[[int], bytes]
    bos: str = ""
    eos: str = ""

    def at_least(self, text: str) -> int:
        """A lower bound on the number of tokens of `text`, without the cost of tokenizing it.

        Raises UnicodeEncodeError where `text` holds half a surrogate pair.
        """
        return -(-len(text.encode()) // self.longest_bytes)


class Detokenizer:
    """The text of a growing list of ids, released by whole characters.

    Decodes a short window twice, without and with the new id, and releases the difference: what a token adds
    depends on its neighbours (leading spaces, bytes of one character, joined scalars), which the last prompt
    tokens provide for the first one. The method of the text-generation servers TGI and vLLM; the cost of a
    token does not depend on the length of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-PRIME_TOKENS:])
        self._shown = len(self._window)  # ids of the window whose text is released

    def add(self, token: int) -> str:
        """Take one id; return the text it completes, or an empty string."""
        self._window.append(token)
        text = self._fresh()
        num_held = len(self._window) - self._shown
        if not text or (text.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text

    def finish(self) -> str:
        """Release what is whole of the text held back; the incomplete character at its end is dropped."""
        text = self._fresh()
        self._shown = len(self._window)
        return text.rstrip(REPLACEMENT)

    def _fresh(self) -> str:
        """The window's text behind what is released already."""
        before, text = self._decode(self._window[: self._shown]), self._decode(self._window)
        if text.startswith(before):
            return text[len(before) :]
        return text[len(before.rstrip(REPLACEMENT)) :]  # a prompt that ends within a character
