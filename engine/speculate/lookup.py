"""Prompt lookup: what followed the last tokens when they came before (Saxena 2023, "prompt lookup decoding").

Token ids alone. An index is made once for a row and grows with its answer.
"""

from collections.abc import Sequence

LONGEST, SHORTEST = 3, 2  # n-grams that are looked for, the longest first
MOST_SAME = 8  # tokens before a place that are compared; more say nothing more
# Kinds of proposals: from how many such tokens on, and how much of them is about right.
KINDS = ((SHORTEST, 0.5), (LONGEST, 0.5), (4, 0.7), (MOST_SAME, 0.9))


def kind_of(num_same: int) -> int:
    """The kind of a proposal behind so many tokens that came before."""
    return max(kind for kind, (least, _) in enumerate(KINDS) if least <= num_same)


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

    def proposal(self, num_tokens: int) -> tuple[tuple[int, ...], int]:
        """What the sequence may go on with, up to `num_tokens`, and how many tokens at its end came before, as
        far as that is looked at; nothing and 0 where it never came before.

        Where what followed is the end itself, it is gone round again.
        """
        for size in range(LONGEST, SHORTEST - 1, -1):
            place = self._behind.get(tuple(self.tokens[-size:])) if size <= len(self.tokens) else None
            if place is not None:
                period = len(self.tokens) - place
                return tuple(self.tokens[place + at % period] for at in range(num_tokens)), self._same(place, size)
        return (), 0

    def _same(self, place: int, size: int) -> int:
        """How many tokens before `place` are those at the end, at least `size`."""
        while size < min(place, MOST_SAME) and self.tokens[place - size - 1] == self.tokens[-size - 1]:
            size += 1
        return size
