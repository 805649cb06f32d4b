"""The one finish step: what a new token means for its row.

End of sequence, stop strings, loops, the bounds on new tokens and context, and the text that may be shown by now.
A token's text is held back while it may be the start of a stop string or is half a character, and its logprobs
with it. No arrays, no tokenizer: the decoder is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.request import FinishReason, Loops, Output, Request, Row, Timings, TokenLogprob
from engine.text.tokens import Detokenizer

Decode = Callable[[Sequence[int]], str]


class StopMatcher:
    """Finds the first of several strings in a text that comes in pieces, whatever the pieces are.

    The first stop string to be complete wins, of those that end at the same place the longest. Nothing that
    may still become one is released.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take `text`; return what is released and whether a stop string was found (it is not released)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at = min(found)
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
    """The finish step's part of a row.

    Of the answer's characters, `num_decoded` are known and `num_released` shown; `held` are the logprobs of tokens
    whose text begins behind the latter.
    """

    detokenizer: Detokenizer
    stops: StopMatcher = field(default_factory=lambda: StopMatcher(()))
    num_decoded: int = 0
    num_released: int = 0
    held: list[TokenLogprob] = field(default_factory=list)

    def add(self, token: int) -> tuple[str, bool]:
        """Take one id; the text that this releases, and whether a stop string ended it."""
        return self._feed(self.detokenizer.add(token))

    def end(self) -> tuple[str, bool]:
        """Release all held text; what was held may still complete a stop string."""
        released, stopped = self._feed(self.detokenizer.finish())
        return (released, True) if stopped else (released + self.stops.flush(), False)

    def hold(self, logprob: TokenLogprob) -> None:
        """Keep the logprobs of the token that is about to be added."""
        self.held.append(replace(logprob, offset=self.num_decoded))

    def release(self, released: str, *, everything: bool) -> tuple[TokenLogprob, ...]:
        """The logprobs that go with `released`, or all that are held."""
        self.num_released += len(released)
        count = sum(logprob.offset < self.num_released for logprob in self.held)
        told = self.held if everything else self.held[:count]
        self.held = [] if everything else self.held[count:]
        return tuple(told)

    def _feed(self, text: str) -> tuple[str, bool]:
        self.num_decoded += len(text)
        return self.stops.feed(text)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a token did to its row: the text it released, and why the row ends, if it does.

    `cut`: by a stop string, so that what is still held is no part of the answer.
    """

    released: str
    reason: FinishReason | None = None
    cut: bool = False


class FinishStep:
    """Decides for every new token, however it came: `end_tokens` are the ids that end a sequence."""

    def __init__(self, decode: Decode, end_tokens: frozenset[int]) -> None:
        self._decode = decode
        self._end_tokens = end_tokens

    def open(self, request: Request) -> RowText:
        """The text state of a row that is about to run."""
        return RowText(Detokenizer(self._decode, request.prompt), StopMatcher(request.stop))

    def finish(self, row: Row, token: int, now_s: float, logprob: TokenLogprob | None = None) -> Output:
        """Append `token` to `row`; set `row.finish_reason` if it was the last.

        Logprobs are told of every token but the end of the sequence, and those of which a stop string leaves
        nothing.
        """
        assert row.finish_reason is None, "a finished row takes no more tokens"
        if not row.output:
            row.first_token_s = now_s
        row.output.append(token)
        text: RowText = row.text
        ends = token in self._end_tokens and not row.request.ignore_eos
        if logprob is not None and not ends:
            text.hold(logprob)
        verdict = self._judge(row, token, ends=ends)
        over = verdict.reason is not None
        logprobs = text.release(verdict.released, everything=over and not verdict.cut)
        if verdict.reason is None:
            return Output(row, token, verdict.released, logprobs=logprobs)
        row.finish_reason = verdict.reason
        timings = Timings(
            prompt_n=len(row.request.prompt) - row.num_cached,
            prompt_ms=(row.first_token_s - row.started_s) * 1000,
            predicted_n=len(row.output),
            predicted_ms=(now_s - row.first_token_s) * 1000,
            cache_n=row.num_cached,
            cache_miss=row.cache_miss,
        )
        return Output(row, token, verdict.released, verdict.reason, timings, logprobs)

    def _judge(self, row: Row, token: int, *, ends: bool) -> _Verdict:
        text: RowText = row.text
        released, stopped = ("", False) if ends else text.add(token)
        if stopped:
            return _Verdict(released, "stop", cut=True)
        if ends or loops(row.output, row.request.loops):
            reason: FinishReason = "stop"
        elif len(row.output) >= row.limit_tokens:
            reason = "length"
        else:
            return _Verdict(released)
        rest, stopped = text.end()
        return _Verdict(released + rest, "stop" if stopped else reason, cut=stopped)


def loops(tokens: Sequence[int], bounds: Loops | None) -> bool:
    """Whether `tokens` end in a sequence that came as often in a row as `bounds` has it (as in vLLM)."""
    if bounds is None:
        return False
    for size in range(bounds.min_tokens, bounds.max_tokens + 1):
        length = size * bounds.count
        if length > len(tokens):
            return False
        if tokens[-1] == tokens[-1 - size] and tokens[-length:-size] == tokens[size - length :]:
            return True
    return False
