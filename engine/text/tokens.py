"""Token ids to text and back. The tokenizer is given: this module imports none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.breakers import SequenceBreakers
from engine.text.spelling import spelling_of

REPLACEMENT = "\ufffd"  # what decoders put where bytes are not (yet) a character
PRIME_TOKENS = 6
MAX_HELD_TOKENS = 8  # more than the bytes of any character: what is still no text by then never will be


@dataclass(frozen=True, slots=True)
class Tokens:
    """A model's tokenizer as two functions. Both are called from several threads.

    `encode(text, add_special)` puts a beginning-of-sequence token before the text only if `add_special`;
    `decode` shows special tokens as they are written. No token stands for more than `longest_bytes` of text.
    `bos` and `eos` are the texts of the tokens that begin and end a sequence, empty where there is none. `spell`
    gives a token's bytes; `breakers` finds the tokens with which texts begin, and those that must follow.
    """

    encode: Callable[[str, bool], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    longest_bytes: int
    spell: Callable[[int], bytes]
    breakers: Callable[[tuple[str, ...]], Mapping[int, tuple[tuple[int, ...], ...]]]
    bos: str = ""
    eos: str = ""

    def at_least(self, text: str) -> int:
        """A lower bound on the number of tokens of `text`, without the cost of tokenizing it.

        Raises UnicodeEncodeError where `text` holds half a surrogate pair.
        """
        return -(-len(text.encode()) // self.longest_bytes)


def tokens_of(tokenizer: Any, vocab_size: int) -> Tokens:
    """The Tokens of a tokenizer of transformers, for a model that knows `vocab_size` of them.

    What is too long for the model is refused where its length is known, and no tokenizer need warn of it.
    """
    spell = spelling_of(tokenizer)

    def encode(text: str, add_special: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=add_special, verbose=False))

    return Tokens(
        encode=encode,
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        vocab_size=vocab_size,
        longest_bytes=max(len(token.encode()) for token in tokenizer.get_vocab()),
        spell=spell,
        breakers=SequenceBreakers(vocab_size, spell, lambda text: encode(text, False)).find,
        bos=tokenizer.bos_token or "",
        eos=tokenizer.eos_token or "",
    )


class Detokenizer:
    """The text of a growing list of ids, released by whole characters.

    Decodes a short window twice, without and with the new id, and releases the difference: what a token adds
    depends on its neighbours (leading spaces, bytes of one character, joined scalars), which the last prompt
    tokens provide for the first one. The method of the text-generation servers TGI and vLLM; the cost of a
    token does not depend on the length of the text. `num_chars` counts the characters released so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-PRIME_TOKENS:])
        self._shown = len(self._window)  # ids of the window whose text is released
        self.num_chars = 0

    def add(self, token: int) -> str:
        """Take one id; return the text it completes, or an empty string."""
        self._window.append(token)
        text = self._fresh()
        num_held = len(self._window) - self._shown
        if not text or (text.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        self.num_chars += len(text)
        return text

    def finish(self) -> str:
        """Release what is whole of the text held back; the incomplete character at its end is dropped."""
        text = self._fresh().rstrip(REPLACEMENT)
        self._shown = len(self._window)
        self.num_chars += len(text)
        return text

    def _fresh(self) -> str:
        """The window's text behind what is released already."""
        before, text = self._decode(self._window[: self._shown]), self._decode(self._window)
        if text.startswith(before):
            return text[len(before) :]
        return text[len(before.rstrip(REPLACEMENT)) :]  # a prompt that ends within a character
