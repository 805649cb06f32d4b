"""Prompt lookup: what followed the last tokens when they came before (Saxena 2023, "prompt lookup decoding").

Token ids alone. An index is made once for a row and grows with its answer.
"""

from collections.abc import Sequence

LONGEST, SHORTEST = 3, 2  # n-grams that are looked for, the longest first


class LookupIndex:
    """Where each n-gram of a sequence was last gone on from. Most recent wins; `tokens` is the sequence so far."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram: the place behind its last occurrence that has one
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence goes on with `tokens`. Costs a few dictionary entries for each."""
        for token in tokens:
            place = len(self.tokens)
            for size in range(SHORTEST, min(LONGEST, place) + 1):
                self._behind[tuple(self.tokens[place - size :])] = place
            self.tokens.append(token)

    def proposal(self, num_tokens: int) -> tuple[int, ...]:
        """What the sequence may go on with: up to `num_tokens`, or nothing where its end never came before.

        Where what followed is the end itself, it is gone round again.
        """
        for size in range(LONGEST, SHORTEST - 1, -1):
            place = self._behind.get(tuple(self.tokens[-size:])) if size <= len(self.tokens) else None
            if place is not None:
                period = len(self.tokens) - place
                return tuple(self.tokens[place + at % period] for at in range(num_tokens))
        return ()
