"""The one finish step: what a new token means for its row.

End of sequence, stop strings, the bounds on new tokens and context, and the text that may be shown by now. A
token's text is held back while it may be the start of a stop string or is half a character. No arrays, no
tokenizer: the decoder is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.request import FinishReason, Output, Request, Row, Timings
from engine.text.tokens import Detokenizer

Decode = Callable[[Sequence[int]], str]


class StopMatcher:
    """Finds the first of several strings in a text that comes in pieces, whatever the pieces are.

    The first stop string to be complete wins, of those that end at the same place the longest. Nothing that
    may still become one is released. `found` is the one that was.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take `text`; return what is released and whether a stop string was found (it is not released)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self.found = self._held[at:end]
            released, self._held = self._held[:at], ""
            return released, True
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released, False

    def flush(self) -> str:
        """Release what is held: no stop string will be completed any more."""
        released, self._held = self._held, ""
        return released

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that is a beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


@dataclass(slots=True)
class RowText:
    """The finish step's part of a row."""

    detokenizer: Detokenizer
    stops: StopMatcher = field(default_factory=lambda: StopMatcher(()))


class FinishStep:
    """Decides for every new token, however it came: `end_tokens` are the ids that end a sequence."""

    def __init__(self, decode: Decode, end_tokens: frozenset[int]) -> None:
        self._decode = decode
        self._end_tokens = end_tokens

    def open(self, request: Request) -> RowText:
        """The text state of a row that is about to run."""
        return RowText(Detokenizer(self._decode, request.prompt), StopMatcher(request.stop))

    def finish(self, row: Row, token: int, now_s: float) -> Output:
        """Append `token` to `row`; set `row.finish_reason` if it was the last."""
        assert row.finish_reason is None, "a finished row takes no more tokens"
        if not row.output:
            row.first_token_s = now_s
        row.output.append(token)
        released, reason = self._judge(row, token)
        if reason is None:
            return Output(row, token, released)
        row.finish_reason = reason
        row.stop_string = row.text.stops.found
        timings = Timings(
            prompt_n=len(row.request.prompt) - row.num_cached,
            prompt_ms=(row.first_token_s - row.started_s) * 1000,
            predicted_n=len(row.output),
            predicted_ms=(now_s - row.first_token_s) * 1000,
            cache_n=row.num_cached,
            cache_miss=row.cache_miss,
        )
        return Output(row, token, released, reason, timings)

    def _judge(self, row: Row, token: int) -> tuple[str, FinishReason | None]:
        text: RowText = row.text
        if token in self._end_tokens and not row.request.ignore_eos:
            return self._end(text, "stop")
        released, stopped = text.stops.feed(text.detokenizer.add(token))
        if stopped:
            return released, "stop"
        if len(row.output) >= row.limit_tokens:
            rest, reason = self._end(text, "length")
            return released + rest, reason
        return released, None

    @staticmethod
    def _end(text: RowText, reason: FinishReason) -> tuple[str, FinishReason]:
        """Release all held text; what was held may still complete a stop string."""
        released, stopped = text.stops.feed(text.detokenizer.finish())
        if stopped:
            return released, "stop"
        return released + text.stops.flush(), reason
