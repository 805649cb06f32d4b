"""Logprobs that wait for the text of their tokens to be shown. No arrays, no tokenizer."""

from dataclasses import replace

from engine.request import TokenLogprob


class HeldLogprobs:
    """Those of one row's tokens whose text is not shown yet, in order.

    Places are counts of the answer's characters, as they were decoded.
    """

    def __init__(self) -> None:
        self._held: list[TokenLogprob] = []

    def hold(self, logprob: TokenLogprob, at: int) -> None:
        """Keep `logprob`, of a token whose text begins at the place `at`."""
        self._held.append(replace(logprob, offset=at))

    def release(self, until: int) -> tuple[TokenLogprob, ...]:
        """Give those whose text begins before the place `until`."""
        count = sum(logprob.offset < until for logprob in self._held)
        released, self._held = self._held[:count], self._held[count:]
        return tuple(released)

    def release_all(self) -> tuple[TokenLogprob, ...]:
        released, self._held = self._held, []
        return tuple(released)
