"""Plain data between the rooms: what was asked (Request), what runs (Row), what came out (Event).

Nothing here computes, and nothing here knows arrays: a row's storage and its text are opaque to everybody but
their owners.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from engine.errors import MlxcelError
from engine.handover import Arriving, Departing
from engine.text.filter import Markup
from engine.text.parts import Part

FinishReason = Literal["stop", "length", "cancelled"]
Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # the first goes first
# What a template is rendered with belongs to the server, the program that it is above all.
RESERVED_FOR_TEMPLATES = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
NO_LOGPROB = -9999.0  # what stands for a logarithm of zero, as in OpenAI's API
GrammarKind = Literal["json", "regex", "cfg"]
Pooling = Literal["last", "mean", "cls"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row draws. Every default is neutral: it switches its stage off, and temperature 0 is greedy.

    The penalties look at the last `repeat_last_n` tokens of prompt and output; 0 is none of them and -1 all. So
    does DRY at the last `dry_penalty_last_n`. `logit_bias` are pairs of token id and what is added to its logit.
    `mirostat` is its version, 0 for none; it takes the place of all truncations. docs/sampling.md has every stage.
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
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    @property
    def penalizes(self) -> bool:
        """Whether recent tokens are penalized for having come."""
        penalizes = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalizes and self.repeat_last_n != 0

    @property
    def is_dry(self) -> bool:
        """Whether tokens are penalized for going on with a repetition."""
        return self.dry_multiplier != 0 and self.dry_penalty_last_n != 0

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return self.penalizes or self.is_dry or self.mirostat != 0


@dataclass(frozen=True, slots=True)
class Loops:
    """When an answer is going round in circles: its last `count` times `n` tokens are `count` times the same `n`,
    for an `n` from `min_tokens` to `max_tokens`.
    """

    min_tokens: int
    max_tokens: int
    count: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the logarithm of its probability, and the same of the most likely tokens in its place, best first.

    They are the model's own: before bias, penalties, masks, truncations and temperature. `offset` counts the
    characters of the answer before the token's text.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to look like. `text` is a JSON schema, a regular expression, or a grammar: GBNF or Lark.

    With `after`, the text of a token or several, what comes up to it is free, and the rest is held to the grammar:
    so for an answer whose prompt ends within a thinking block. With an `opening` too, the text of one token, that
    is so only for an answer that begins with it. `param` names the request's field in errors.
    """

    kind: GrammarKind
    text: str
    after: str = ""
    opening: str = ""
    param: str = field(default="grammar", compare=False)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most `num_tokens` of reasoning; then the tokens `end`, which end it, take the place of draws."""

    num_tokens: int
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector in an answer's place: the hidden states that the output head would be given, those of the `last`
    token, the `mean` of all, or those of the first, which some encoders call `cls`.

    It is cut to its first `num_dimensions`, then brought to the length 1 where it `normalizes`.
    """

    num_dimensions: int
    pooling: Pooling = "last"
    normalizes: bool = True


@dataclass(frozen=True, slots=True)
class Resumed:
    """How far a request came elsewhere: it goes on behind the tokens `output`, which somebody has already.

    `logprobs` are those of its last tokens that nobody has, `mu` mirostat's state, where it is used; the rest are
    its counts and times so far.
    """

    output: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    mu: float | None = None
    num_cached: int = 0
    cache_miss: int | None = None
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0

    def logprob(self, index: int) -> TokenLogprob | None:
        """That of the output's token at `index`, if nobody has it."""
        place = index - len(self.output) + len(self.logprobs)
        return self.logprobs[place] if place >= 0 else None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be continued.

    `prompt` are token ids, already bounded by the vocabulary; `max_tokens` None means until the context's end;
    `choice` is the k of `n` choices and takes part in every draw. `priority` decides who gets a slot first.
    `cache_prompt` False: nothing is taken from the prompt cache and nothing is put into it; requests with another
    `cache_salt` share nothing with this one; what one with a `prompt_cache_key` uses is kept for longer than what
    others do. `boundaries` are the prompt lengths, ascending, at which a conversation's turns begin, its whole
    length the last: where results depend on the cut, a prompt is cut there, so that the next turn can go on there.
    `top_logprobs` asks for the logprob of each new token, and of that many in its place. `loops` ends an answer.
    `markup` is that of the answer, where it has any: stop strings then match what is said in it and nothing else.
    `thinking` bounds its reasoning. One that is `resumed` began elsewhere, one that `hands_over` leaves with what
    is stored when its next token is there. With an `embedding` it ends with its prompt, and shares nothing: the
    hidden states of what is adopted are not there any more. `adapter` is the name of a mounted one; without it the
    model is as it is.
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
    top_logprobs: int | None = None
    loops: Loops | None = None
    grammar: Grammar | None = None
    markup: Markup | None = None
    thinking: ThinkingBudget | None = None
    resumed: Resumed | None = None
    hands_over: bool = False
    embedding: Embedding | None = None
    adapter: str = ""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where the prompt is cut if results depend on that: its boundaries, and its whole length."""
        whole = len(self.prompt)
        return self.boundaries if self.boundaries[-1:] == (whole,) else (*self.boundaries, whole)

    @property
    def shares(self) -> bool:
        """Whether anything is taken from the prompt cache for it, or put into it."""
        return self.cache_prompt and self.embedding is None

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return self.sampling.looks_back or self.grammar is not None or self.thinking is not None


@dataclass(slots=True)
class DraftCounts:
    """How often draft tokens were verified, how many there were, and how many of them were accepted. `kind`
    says who drafts, where anybody does.
    """

    kind: str = ""
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    pauses: int = 0

    @property
    def mean_accepted(self) -> float:
        """Accepted draft tokens of a step that verified some."""
        return self.accepted / self.rounds if self.rounds else 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One more step that verified."""
        self.rounds += 1
        self.proposed += num_drafted
        self.accepted += num_accepted


@dataclass(eq=False, slots=True)
class Row:
    """One sequence while it lives. `limit_tokens` bounds its new tokens. `prefill_tokens` are stored before it
    decodes: its prompt, and where it was preempted the output so far; `cursor` counts those that are stored.

    `num_cached` are prompt tokens that were not computed for it when it first ran. `cache_miss` is the index of
    the first prompt token that differs from something kept that goes on there, if there was such a thing then.

    `storage` (per-layer state) belongs to the engine, `text` (detokenizer, filter and stop matcher) to the
    finish step, `sampler` (what draws know of the draws before) to the sampler step. `constraint` (its place in
    its grammar) follows `output` and outlives the storage. `forced` are the tokens that come next whatever is
    drawn. `stop_string` is the one that ended it, if one did. `is_warm_up`: nobody asked for it yet.
    `num_drafted` are the tokens that it brings to the next step beside its last one; `drafts` counts those of
    all steps. `arriving` is what it begins with that was stored elsewhere; one that `is_leaving` is not run again.
    `pooled` is what its embedding comes to so far, and belongs to the engine as `storage` does.
    `adapter` is the number of what its request's was when it came, 0: none.
    """

    request: Request
    limit_tokens: int
    seed: int
    text: Any
    sampler: Any = None
    constraint: Any = None
    storage: Any = None
    pooled: Any = None
    cursor: int = 0
    num_cached: int = 0
    cache_miss: int | None = None
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    num_preempted: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0
    forced: tuple[int, ...] = ()
    is_warm_up: bool = False
    num_drafted: int = 0
    looked_at: tuple[int, ...] = ()
    drafts: DraftCounts = field(default_factory=DraftCounts)
    arriving: Arriving | None = None
    is_leaving: bool = False
    adapter: int = 0
    prefill_tokens: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.prefill_tokens = self.request.prompt

    def shares_with(self, other: "Row") -> bool:
        """Whether one may begin with what the other has stored."""
        one, two = self.request, other.request
        return one.shares and two.shares and self.adapter == other.adapter and one.cache_salt == two.cache_salt

    @property
    def prefilled(self) -> bool:
        """Whether all that comes before the next token is stored, so that the row decodes."""
        return self.cursor == len(self.prefill_tokens)

    @property
    def is_counted(self) -> bool:
        """Whether what it reuses counts: not for a second time, and not where nobody has asked for it."""
        return not (self.num_preempted or self.is_warm_up or self.request.resumed)

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

    `prompt_n` prompt tokens were computed and `cache_n` were not; `cache_miss` is the row's. Of the `predicted_n`
    new tokens, `reasoning_n` were reasoning; `drafts` is the row's.
    """

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    cache_n: int = 0
    cache_miss: int | None = None
    reasoning_n: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)


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
    """One new token, and the text it released (often empty). The last one carries the reason and the timings.

    `logprobs` are of the tokens whose text was released, where they are asked for.
    Where the request has markup the text is in `parts`, and `text` is the answer among them. `drawn` is the
    token's own logprob, if it is asked for and the token may be shown; `mu` mirostat's state behind the token.
    """

    row: Row
    token: int
    text: str
    finish_reason: FinishReason | None = None
    timings: Timings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    parts: tuple[Part, ...] = ()
    drawn: TokenLogprob | None = None
    mu: float | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """The row has ended with its vector; `prompt_ms` is how long it ran."""

    row: Row
    vector: tuple[float, ...]
    prompt_ms: float


@dataclass(frozen=True, slots=True)
class Handed:
    """The row goes on elsewhere: what it has stored stays until whoever was told gives the row up."""

    row: Row
    departing: Departing


@dataclass(frozen=True, slots=True)
class Failed:
    """The row ended by an error."""

    row: Row
    error: MlxcelError


Event = Progress | Output | Embedded | Handed | Failed
