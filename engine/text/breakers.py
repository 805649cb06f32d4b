"""Sequence breakers of DRY, from texts to the token ids that write them.

A breaker may begin inside a token and end inside another, so every token of the vocabulary is looked at once for
each breaker (the method of llama.cpp). The tokenizer is given: this module imports none.
"""

import functools
from collections.abc import Callable, Sequence

MAX_TAIL_TOKENS = 20


class SequenceBreakers:
    """Finds the tokens of breakers; what was found is kept. Safe to use from several threads.

    `spell` gives a token's bytes, `encode` the tokens of a text.
    """

    def __init__(
        self, vocab_size: int, spell: Callable[[int], bytes], encode: Callable[[str], Sequence[int]]
    ) -> None:
        self._vocab_size = vocab_size
        self._spell = spell
        self._encode = encode
        self.find = functools.lru_cache(maxsize=64)(self._find)
        self._of_one = functools.lru_cache(maxsize=256)(self._find_one)

    @functools.cached_property
    def _spelled(self) -> list[bytes]:
        return [self._spell(token) for token in range(self._vocab_size)]

    def _find(self, breakers: tuple[str, ...]) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Tokens with which one of `breakers` can begin, each with the tokens that must follow."""
        found: dict[int, set[tuple[int, ...]]] = {}
        for breaker in breakers:
            for token, tail in self._of_one(breaker):
                found.setdefault(token, set()).add(tail)
        return {token: tuple(sorted(tails)) for token, tails in found.items()}

    def _find_one(self, breaker: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
        wanted = breaker.encode()
        tails: dict[int, tuple[int, ...]] = {}  # how many bytes a token has, to the tokens of the rest
        found: list[tuple[int, tuple[int, ...]]] = []
        for token, spelled in enumerate(self._spelled):
            if wanted in spelled:
                found.append((token, ()))
                continue
            for num_bytes in range(1, min(len(wanted) - 1, len(spelled)) + 1):
                if not spelled.endswith(wanted[:num_bytes]):
                    continue
                if num_bytes not in tails:
                    rest = wanted[num_bytes:].decode(errors="ignore")
                    tails[num_bytes] = tuple(self._encode(rest)[:MAX_TAIL_TOKENS])
                if tails[num_bytes]:
                    found.append((token, tails[num_bytes]))
        return tuple(found)
