"""Plain data between the rooms: what was asked (Request), what runs (Row), what came out (Event).

Nothing here computes, and nothing here knows arrays: a row's storage and its text are opaque to everybody but
their owners.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from engine.errors import MlxcelError

FinishReason = Literal["stop", "length", "cancelled"]
Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # the first goes first


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row draws. Every default is neutral: it switches its stage off, and temperature 0 is greedy.

    The penalties look at the last `repeat_last_n` tokens of prompt and output; 0 is none of them and -1 all.
    `logit_bias` are pairs of token id and what is added to its logit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        penalizes = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalizes and self.repeat_last_n != 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be continued.

    `prompt` are token ids, already bounded by the vocabulary; `max_tokens` None means until the context's end;
    `choice` is the k of `n` choices and takes part in every draw. `priority` decides who gets a slot first.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    choice: int = 0
    priority: Priority = "normal"


@dataclass(eq=False, slots=True)
class Row:
    """One sequence while it lives. `limit_tokens` bounds its new tokens; `cursor` counts prompt tokens stored.

    `storage` (per-layer state) belongs to the engine, `text` (detokenizer and stop matcher) to the finish step.
    """

    request: Request
    limit_tokens: int
    seed: int
    text: Any
    storage: Any = None
    cursor: int = 0
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    started_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is stored, so that the row decodes."""
        return self.cursor == len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one row's time went, in milliseconds of wall clock."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` prompt tokens of this row are stored."""

    row: Row
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Output:
    """One new token, and the text it released (often empty). The last one carries the reason and the timings."""

    row: Row
    token: int
    text: str
    finish_reason: FinishReason | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The row ended by an error."""

    row: Row
    error: MlxcelError


Event = Progress | Output | Failed
