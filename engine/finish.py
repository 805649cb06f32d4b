"""The one finish step: what a new token means for its row.

End of sequence, stop strings, loops, the end of a grammar, the bounds on new tokens and context, and the text that
may be shown by now. A token's text is held back while it may be the start of a stop string or of a tag, or is half
a character, and its logprobs with it. Stop strings are looked for in the answer, not in reasoning and not in
markup. No arrays, no tokenizer: the decoder is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.request import FinishReason, Loops, Output, Request, Resumed, Row, Timings, TokenLogprob
from engine.text.held import HeldLogprobs
from engine.text.parts import Part, StreamFilter, put
from engine.text.tokens import Detokenizer

Decode = Callable[[Sequence[int]], str]


class StopMatcher:
    """Finds the first of several strings in a text that comes in pieces, whatever the pieces are.

    The first stop string to be complete wins, of those that end at the same place the longest. Nothing that
    may still become one is released. `found` is the one that was, `num_held` how many of the characters that were
    taken are not released.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = ""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> tuple[str, bool]:
        """Take `text`; return what is released and whether a stop string was found (it is not released)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self.found = self._held[at:end]
            released, self._held = self._held[:at], self._held[at:]
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
    """The finish step's part of a row. `num_reasoning` counts the tokens that were read within reasoning."""

    detokenizer: Detokenizer
    stops: StopMatcher = field(default_factory=lambda: StopMatcher(()))
    logprobs: HeldLogprobs = field(default_factory=HeldLogprobs)
    filter: StreamFilter | None = None
    num_reasoning: int = 0

    @property
    def is_reasoning(self) -> bool:
        return self.filter is not None and self.filter.is_reasoning

    @property
    def num_held(self) -> int:
        """How many characters of the decoded text are not released yet."""
        return self.stops.num_held + (self.filter.num_held if self.filter is not None else 0)


class FinishStep:
    """Decides for every new token, however it came: `end_tokens` are the ids that end a sequence."""

    def __init__(self, decode: Decode, end_tokens: frozenset[int]) -> None:
        self._decode = decode
        self._end_tokens = end_tokens

    def open(self, request: Request) -> RowText:
        """The text state of a row that is about to run."""
        filter_ = None if request.markup is None else request.markup.filter()
        return RowText(Detokenizer(self._decode, request.prompt), StopMatcher(request.stop), filter=filter_)

    def begin(self, row: Row) -> None:
        """Force the end of a thought that the prompt has opened and that may have no token."""
        self._bound_thought(row)

    def finish(self, row: Row, token: int, now_s: float, logprob: TokenLogprob | None = None) -> Output:
        """Append `token` to `row`; set `row.finish_reason` if it was the last.

        Logprobs are told of every token but the end of the sequence, and those of which a stop string leaves
        nothing.
        """
        assert row.finish_reason is None, "a finished row takes no more tokens"
        text: RowText = row.text
        if not row.output:
            row.first_token_s = now_s
        row.output.append(token)
        row.forced = row.forced[1:] if row.forced[:1] == (token,) else ()
        was_reasoning = text.is_reasoning
        if logprob is not None and self._ends(row, token):
            logprob = None
        if logprob is not None:
            text.logprobs.hold(logprob, text.detokenizer.num_chars)
        parts, reason = self._judge(row, token)
        text.num_reasoning += was_reasoning or text.is_reasoning
        if reason is None or text.stops.found:
            logprobs = text.logprobs.release(text.detokenizer.num_chars - text.num_held)
        else:
            logprobs = text.logprobs.release_all()
        said = "".join(part.text for part in parts if part.kind == "answer")
        shown = () if text.filter is None else tuple(parts)
        if reason is None:
            self._bound_thought(row)
            mu = row.sampler.mu if row.request.sampling.mirostat else None
            return Output(row, token, said, logprobs=logprobs, parts=shown, drawn=logprob, mu=mu)
        row.finish_reason = reason
        row.stop_string = text.stops.found
        timings = Timings(
            prompt_n=len(row.request.prompt) - row.num_cached,
            prompt_ms=(row.first_token_s - row.started_s) * 1000,
            predicted_n=len(row.output),
            predicted_ms=(now_s - row.first_token_s) * 1000,
            cache_n=row.num_cached,
            cache_miss=row.cache_miss,
            reasoning_n=text.num_reasoning,
            drafts=row.drafts,
        )
        return Output(row, token, said, reason, timings, logprobs, shown)

    def resume(self, row: Row, resumed: Resumed, now_s: float) -> bool:
        """Bring a row that is about to run to where it came elsewhere; False: it has ended there."""
        row.started_s = now_s - (resumed.prompt_ms + resumed.predicted_ms) / 1000
        for index, token in enumerate(resumed.output):
            if row.finish_reason is None:
                self.finish(row, token, now_s - resumed.predicted_ms / 1000, resumed.logprob(index))
        row.num_cached, row.cache_miss = resumed.num_cached, resumed.cache_miss
        row.prefill_tokens = (*row.request.prompt, *row.output)
        return row.finish_reason is None

    @staticmethod
    def _bound_thought(row: Row) -> None:
        """Force the end of a thought that has used up its budget."""
        text, bound = row.text, row.request.thinking
        if bound and not row.forced and text.is_reasoning and text.num_reasoning >= bound.num_tokens:
            row.forced = bound.end

    def _judge(self, row: Row, token: int) -> tuple[list[Part], FinishReason | None]:
        text: RowText = row.text
        if self._ends(row, token):
            return self._end(text, "stop")
        parts, stopped = self._said(text, text.detokenizer.add(token))
        if stopped:
            return parts, "stop"
        if row.constraint is not None and row.constraint.is_over(row.output):
            rest, reason = self._end(text, "stop")
            return parts + rest, reason
        looping = loops(row.output, row.request.loops)
        if looping or len(row.output) >= row.limit_tokens:
            rest, reason = self._end(text, "stop" if looping else "length")
            return parts + rest, reason
        return parts, None

    @classmethod
    def _end(cls, text: RowText, reason: FinishReason) -> tuple[list[Part], FinishReason]:
        """Release all held text; what was held may still complete a stop string."""
        parts, stopped = cls._said(text, text.detokenizer.finish())
        if not stopped and text.filter is not None:
            rest, stopped = cls._matched(text, text.filter.finish())
            parts += rest
        if stopped:
            return parts, "stop"
        put(parts, "answer", text.stops.flush())
        return parts, reason

    @classmethod
    def _said(cls, text: RowText, fresh: str) -> tuple[list[Part], bool]:
        """The parts that `fresh` text releases, and whether it completed a stop string."""
        if text.filter is None:
            return cls._matched(text, [Part("answer", fresh)])
        return cls._matched(text, text.filter.feed(fresh) if fresh else [])

    def _ends(self, row: Row, token: int) -> bool:
        """Whether `token` ends the sequence."""
        return token in self._end_tokens and not row.request.ignore_eos

    @staticmethod
    def _matched(text: RowText, parts: Sequence[Part]) -> tuple[list[Part], bool]:
        """What may be shown of `parts`: a stop string is looked for in the answer, between two other parts."""
        released: list[Part] = []
        for part in parts:
            if part.kind != "answer":
                put(released, "answer", text.stops.flush())
                released.append(part)
                continue
            said, stopped = text.stops.feed(part.text)
            put(released, "answer", said)
            if stopped:
                return released, True
        return released, False


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
