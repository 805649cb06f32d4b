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
    `cache_prompt` False: nothing is taken from the prompt cache and nothing is put into it; requests with another
    `cache_salt` share nothing with this one; what one with a `prompt_cache_key` uses is kept for longer than what
    others do. `boundaries` are the prompt lengths, ascending, at which a conversation's turns begin, its whole
    length the last: where results depend on the cut, a prompt is cut there, so that the next turn can go on there.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    choice: int = 0
    priority: Priority = "normal"
    cache_prompt: bool = True
    cache_salt: str = ""
    prompt_cache_key: str = ""
    boundaries: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class Row:
    """One sequence while it lives. `limit_tokens` bounds its new tokens. `prefill_tokens` are stored before it
    decodes: its prompt, and where it was preempted the output so far; `cursor` counts those that are stored.

    `num_cached` are prompt tokens that were not computed for it when it first ran. `cache_miss` is the index of
    the first prompt token that differs from something kept that goes on there, if there was such a thing then.

    `storage` (per-layer state) belongs to the engine, `text` (detokenizer and stop matcher) to the finish step.
    `stop_string` is the one that ended it, if one did.
    """

    request: Request
    limit_tokens: int
    seed: int
    text: Any
    storage: Any = None
    cursor: int = 0
    num_cached: int = 0
    cache_miss: int | None = None
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    num_preempted: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0
    prefill_tokens: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.prefill_tokens = self.request.prompt

    @property
    def prefilled(self) -> bool:
        """Whether all that comes before the next token is stored, so that the row decodes."""
        return self.cursor == len(self.prefill_tokens)

    @property
    def most_tokens(self) -> int:
        """Prompt and answer at their longest."""
        return len(self.request.prompt) + self.limit_tokens

    def start_over(self) -> None:
        """Go on later from nothing stored: what was said stays said, and becomes part of what is prefilled."""
        assert self.storage is None, "what a row has stored is given back before"
        self.cursor = 0
        self.num_preempted += 1
        self.prefill_tokens = (*self.request.prompt, *self.output)


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one row's time went, in milliseconds of wall clock.

    `prompt_n` prompt tokens were computed and `cache_n` were not; `cache_miss` is the row's.
    """

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    cache_n: int = 0
    cache_miss: int | None = None


@dataclass(frozen=True, slots=True)
class Storable:
    """What may be stored: `budget_bytes` for rows and prompt cache, None where nothing bounds it; `weight_bytes`
    lie beside. Each further token of a long row takes `token_bytes`, a row that fills its context `row_bytes`.
    """

    budget_bytes: int | None
    weight_bytes: int
    token_bytes: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What the prompt cache holds, and what has happened since the start. A hit is a row that computed less.

    A family's entries are blocks or snapshots of whole rows. `off_plan` are adoptions that ended where the plan of
    a cold prompt would not have cut; `verify_checked` hits were computed again, and `verify_different` of them
    were not what the whole prompt gives.
    """

    enabled: bool = False
    num_bytes: int = 0
    budget_bytes: int = 0
    num_blocks: int = 0
    block_tokens: int = 0
    num_snapshots: int = 0
    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    evictions: int = 0
    expirations: int = 0
    off_plan: int = 0
    verify_checked: int = 0
    verify_different: int = 0


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
