"""The one generation path: every dialect's request comes here, and pieces of answer leave.

Render, tokenize, check, enqueue; then a stream of pieces. The unstreamed answer is the fold of that stream.
Knows no HTTP.
"""

import dataclasses
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ContextLengthExceeded, EmbeddingsOnly, MlxcelError, NeverFits, RequestError
from engine.request import (
    DraftCounts,
    Grammar,
    Loops,
    Output,
    Priority,
    Progress,
    Request,
    Sampling,
    ThinkingBudget,
    Timings,
    TokenLogprob,
)
from engine.served import ServedModel
from engine.text.continued import Continued
from engine.text.filter import Markup
from engine.text.forcedcalls import arguments_schema, call_grammar, forced
from engine.text.parts import Part
from engine.text.template import begun_by
from engine.text.tokens import REPLACEMENT, Tokens
from engine.text.toolcalls import ToolCalls, Tools
from server.bridge import Bridge, Events
from server.logprobs import Logprobs, Spell
from server.reply import AnswerPiece, Choice, Finish, Prefilled, Reader, Reading, Reason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompted:
    """Prompts as token ids, and the name of the field they came from. `boundaries` are those of each.

    `message_at` tells the message that a token of the prompt is in, where there are messages. `markup` is that of
    the answer, where it has any.
    """

    ids: Sequence[Sequence[int]]
    param: str
    message_at: Callable[[int], int | None] = lambda token: None
    boundaries: tuple[int, ...] = ()
    markup: Markup | None = None


StreamPiece = AnswerPiece | Logprobs


@dataclass(slots=True)
class Usage:
    """Token counts and times of one submission, complete when its stream has ended.

    `timings` are those of its choices, of which each prompt has `per_prompt`. `missed` are the token and the
    message where the first choice that says so leaves what the prompt cache holds. `tokens` are the new ones of
    each choice, `stop_strings` what ended it, empty where no such string did.
    """

    prompt_tokens: int = 0
    per_prompt: int = 1
    completion_tokens: int = 0
    timings: dict[int, Timings] = field(default_factory=dict)
    reasons: list[Reason] = field(default_factory=list)
    first_token_s: float = 0.0  # of `time.perf_counter`; 0 before it
    missed: tuple[int, int | None] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    stop_strings: dict[int, str] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens less those that were computed, whichever of a prompt's choices it was for."""
        left: dict[int, int] = {}
        for choice, timings in self.timings.items():
            prompt = choice // self.per_prompt
            left[prompt] = left.get(prompt, timings.prompt_n + timings.cache_n) - timings.prompt_n
        return sum(max(tokens, 0) for tokens in left.values())

    @property
    def reasoning_tokens(self) -> int:
        return sum(timings.reasoning_n for timings in self.timings.values())

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def timings_body(self, choice: int | None = None) -> dict[str, Any]:
        """Sums over the choices, or of one alone; what was drafted, where anybody drafts.

        A rate counts the tokens whose time was measured: all new ones but the first.
        """
        timings = list(self.timings.values()) if choice is None else [self.timings[choice]]
        prompt_n = sum(t.prompt_n for t in timings)
        prompt_ms = sum(t.prompt_ms for t in timings)
        predicted_n = sum(t.predicted_n for t in timings)
        predicted_ms = sum(t.predicted_ms for t in timings)
        token, message = self.missed or (None, None)
        return {
            "prompt_n": prompt_n,
            "cache_n": sum(t.cache_n for t in timings),
            "cache_miss": None if token is None else {"token_index": token, "message_index": message},
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_second": _rate(prompt_n, prompt_ms),
            "predicted_n": predicted_n,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_second": _rate(predicted_n - len(timings), predicted_ms),
            **_drafted(timings),
        }


class Answer:
    """One submission under way: iterate its pieces, or fold them. `close` cancels what still runs.

    `message_at` is that of its prompt, off the event loop; `reading` says how its calls are read. `on_finish`
    hears of each choice that has ended. `spell` gives a token's bytes; `logprobs` are those of each choice's
    tokens so far, None where nobody asked.
    """

    def __init__(
        self,
        events: Events,
        usage: Usage,
        num_choices: int,
        message_at: Callable[[int], Awaitable[int | None]],
        reading: Reading,
        spell: Spell,
        *,
        with_logprobs: bool,
    ) -> None:
        self._events = events
        self.usage = usage
        self.num_choices = num_choices
        self.on_finish: Callable[[Choice], None] = lambda choice: None
        self.choices = [Choice() for _ in range(num_choices)]
        self._readers = [Reader(choice, reading) for choice in range(num_choices)]
        self._message_at = message_at
        self.spell = spell
        self.logprobs: list[list[TokenLogprob]] | None = (
            [[] for _ in range(num_choices)] if with_logprobs else None
        )

    async def pieces(self) -> AsyncIterator[StreamPiece]:
        """The answer as it comes; `choices` are its fold by then. Raises what made it fail.

        A choice that was preempted is prefilled once more; nothing is said of that once its text has begun.
        """
        begun: set[int] = set()
        waiting: dict[int, tuple[TokenLogprob, ...]] = {}  # for what will be made of a call's text
        async for choice, event in self._events:
            match event:
                case Progress(done=done, total=total):
                    if choice not in begun:
                        yield Prefilled(done, total)
                case Output():
                    begun.add(choice)
                    self.usage.completion_tokens += 1
                    self.usage.tokens.setdefault(choice, []).append(event.token)
                    self.usage.first_token_s = self.usage.first_token_s or time.perf_counter()
                    if event.timings is not None:
                        self.usage.stop_strings[choice] = event.row.stop_string
                        await self._ended(choice, event.timings)
                    parts = event.parts or ((Part("answer", event.text),) if event.text else ())
                    reader = self._readers[choice]
                    pieces = list(reader.pieces(parts, event.finish_reason))
                    if event.logprobs:
                        assert self.logprobs is not None, "logprobs come where they were asked for"
                        self.logprobs[choice] += event.logprobs
                        waiting[choice] = waiting.get(choice, ()) + event.logprobs
                    if choice in waiting and (pieces or not reader.is_holding):
                        yield Logprobs(choice, waiting.pop(choice))
                    for piece in pieces:
                        self.choices[choice].add(piece)
                        if isinstance(piece, Finish):
                            self.usage.reasons.append(piece.reason)
                            self.on_finish(self.choices[choice])
                        yield piece

    async def _ended(self, choice: int, timings: Timings) -> None:
        self.usage.timings[choice] = timings
        if timings.cache_miss is not None and self.usage.missed is None:
            self.usage.missed = timings.cache_miss, await self._message_at(timings.cache_miss)

    async def fold(self) -> list[Choice]:
        """The choices when all have ended."""
        async for _ in self.pieces():
            pass
        return self.choices

    def fail(self, error: MlxcelError) -> None:
        """Cancel what still runs, and end the stream of pieces with `error`."""
        self._events.fail(error)

    def close(self) -> None:
        self._events.close()


async def chat_prompt(
    bridge: Bridge,
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Tools = (),
    arguments: Mapping[str, Any] | None = None,
    continues: bool = False,
) -> Prompted:
    """Render a conversation, whose last message it `continues` or not, and tokenize it, off the event loop.

    Raises RequestError.
    """
    _check_continues(model)

    def render() -> tuple[str, list[int], tuple[int, ...]]:
        text = model.template.render(messages, tools=tools, arguments=arguments, continues=continues)
        ids = encode(model, text, add_special=False, param="messages")
        if not model.cuts_at_turns:
            return text, ids, ()
        ids_of = functools.partial(encode, model, add_special=False, param="messages")
        return text, ids, model.template.boundaries(messages, ids, ids_of, tools=tools, arguments=arguments)

    text, ids, boundaries = await bridge.text_work(render)
    markup = None
    if tools or model.markup.reasons:
        begun = begun_by(messages[-1]) if continues else ""
        markup = _behind(model.markup.behind(text.removesuffix(begun), calls=bool(tools)), begun)

    def message_at(token: int) -> int | None:
        before = model.tokens.decode(ids[:token]).rstrip(REPLACEMENT)
        return model.template.message_at(messages, before, tools=tools, arguments=arguments)

    return Prompted([ids], "messages", message_at, boundaries, markup)


def _behind(markup: Markup, begun: str) -> Markup:
    """`markup`, of a reply of which the prompt has `begun`. Raises RequestError where that is half a call."""
    if not begun:
        return markup
    continued = Continued.of(markup, begun)
    if continued.breaks_off_in_call:
        raise RequestError("messages: a call that has begun cannot be gone on from", param="messages")
    return continued


async def text_prompts(
    bridge: Bridge, model: ServedModel, prompts: Sequence[str | Sequence[int | str]], *, num_choices: int = 1
) -> Prompted:
    """Tokenize raw prompts, off the event loop; ids among them are taken as they are. Raises RequestError."""
    _check_continues(model)
    _check_count(bridge, len(prompts), num_choices)

    def tokenize() -> list[Sequence[int]]:
        return [
            spliced(
                [prompt] if isinstance(prompt, str) else prompt,
                functools.partial(encode, model, param="prompt"),
                add_special=True,
            )
            for prompt in prompts
        ]

    return Prompted(await bridge.text_work(tokenize), "prompt")


def spliced(parts: Sequence[int | str], encode: Callable[..., list[int]], *, add_special: bool) -> list[int]:
    """The ids of a sequence given as ids and texts; `add_special`: what begins a sequence is put before the first
    text, where that begins it.
    """
    ids: list[int] = []
    for place, part in enumerate(parts):
        ids += [part] if isinstance(part, int) else encode(part, add_special=add_special and place == 0)
    return ids


def encode(model: ServedModel, text: str, *, add_special: bool, param: str, num_new: int = 1) -> list[int]:
    """Tokens of `text`; one that, by its mere size, leaves no room for `num_new` more is refused before it costs
    anything.
    """
    try:
        at_least = model.tokens.at_least(text)
    except UnicodeEncodeError as fault:
        raise RequestError(f"{param}: the text holds half a surrogate pair", param=param) from fault
    if at_least + num_new > model.context_length:
        raise ContextLengthExceeded(at_least, model.context_length, param=param, at_least=True, num_new=num_new)
    return model.tokens.encode(text, add_special)


async def start(
    bridge: Bridge,
    model: ServedModel,
    request_id: str,
    prompted: Prompted,
    sampling: Sampling,
    *,
    max_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    num_choices: int = 1,
    priority: Priority = "normal",
    cache_prompt: bool = True,
    cache_salt: str = "",
    prompt_cache_key: str = "",
    adapter: str = "",
    top_logprobs: int | None = None,
    loops: Loops | None = None,
    grammar: Grammar | None = None,
    thinking_tokens: int | None = None,
    tools: Tools = (),
    parallel_calls: bool = True,
    tool_calls: ToolCalls | None = None,
) -> Answer:
    """Check the bounds, compile the grammar and enqueue: `num_choices` sequences for each prompt, in that order.

    `thinking_tokens` bounds the reasoning of each; `tools` are those that may be called, and read by `tool_calls`,
    else as the model does it. A grammar holds what comes behind the reasoning. Raises RequestError for a prompt
    that cannot run or a grammar that does not compile, QueueFull and EngineStopped. The answer fails where the
    `adapter` was unmounted meanwhile.
    """
    for token, _ in sampling.logit_bias:
        _check_id(model, token, "logit_bias")
    _check_count(bridge, len(prompted.ids), num_choices)
    if grammar is not None and prompted.markup is not None:
        grammar = _behind_thought(grammar, prompted.markup)
    thinking = None if thinking_tokens is None else _budget(model, thinking_tokens)
    requests = []
    for ids in prompted.ids:
        check_ids(model, ids, prompted.param)
        requests += [
            Request(
                request_id,
                tuple(ids),
                sampling,
                max_tokens,
                stop,
                ignore_eos,
                choice,
                priority,
                cache_prompt,
                cache_salt,
                prompt_cache_key,
                prompted.boundaries,
                top_logprobs=top_logprobs,
                loops=loops,
                grammar=grammar,
                markup=prompted.markup,
                thinking=thinking,
                adapter=adapter,
            )
            for choice in range(num_choices)
        ]
    if grammar is not None:
        await bridge.text_work(functools.partial(model.grammars.compile, grammar))
    events = bridge.submit(requests)

    async def message_at(token: int) -> int | None:
        return await bridge.text_work(lambda: prompted.message_at(token))

    usage = Usage(sum(len(ids) for ids in prompted.ids), num_choices)
    reading = Reading(tool_calls or model.tool_calls, tools, parallel_calls)
    with_logprobs = top_logprobs is not None
    return Answer(
        events, usage, len(requests), message_at, reading, model.tokens.spell, with_logprobs=with_logprobs
    )


def forced_calls(prompted: Prompted, tools: Tools, *, parallel: bool) -> tuple[Prompted, dict[str, Any]]:
    """What a reply that has to call `tools` is prompted with, and what `start` is to be told of it."""
    assert prompted.markup is not None, "a prompt with tools has markup"
    markup = forced(prompted.markup)
    grammar = Grammar("cfg", call_grammar(prompted.markup, tools, parallel=parallel), param="tool_choice")
    return dataclasses.replace(prompted, markup=markup), {"grammar": grammar, "tool_calls": ToolCalls(markup)}


def name_schema(model: ServedModel, tools: Tools, forced: Tools) -> None:
    """Raise RequestError that names the tool whose schema no call can be held to, where that of one of `tools`
    that are `forced` is why all of them together were refused.
    """
    for index, tool in enumerate(tools):
        if any(tool is one for one in forced):
            where = f"tools[{index}].function.parameters"
            model.grammars.compile(Grammar("json", json.dumps(arguments_schema(tool)), param=where))


def _behind_thought(grammar: Grammar, markup: Markup) -> Grammar:
    """`grammar`, from where the answer's thought ends, if it has one."""
    if markup.think is None:
        return grammar
    opening = "" if markup.filter().is_reasoning else markup.think[0]
    return dataclasses.replace(grammar, after=markup.think[1], opening=opening)


def _budget(model: ServedModel, num_tokens: int) -> ThinkingBudget:
    if not model.markup.reasons:
        raise RequestError(
            "thinking_budget: this model's reasoning cannot be told from its answer", param="thinking_budget"
        )
    return ThinkingBudget(num_tokens, tuple(model.tokens.encode(model.markup.ends_thought, False)))


def _check_count(bridge: Bridge, num_prompts: int, num_choices: int) -> None:
    if num_prompts * num_choices > bridge.capacity:
        raise RequestError(
            f"{num_prompts} prompts with n = {num_choices} are {num_prompts * num_choices} sequences; at most "
            f"{bridge.capacity} run and wait here",
            param="n",
        )


def _check_continues(model: ServedModel) -> None:
    if not model.continues:
        raise EmbeddingsOnly(
            "this model gives embeddings and continues nothing: ask /v1/embeddings", param="model"
        )


def check_ids(model: ServedModel, ids: Sequence[int], param: str, *, num_new: int = 1) -> None:
    """Raise RequestError for a prompt that cannot run with `num_new` tokens behind it."""
    if not ids:
        what = "continue" if num_new else "embed"
        raise RequestError(f"the prompt has no tokens: there is nothing to {what}", param=param)
    if len(ids) + num_new > model.context_length:
        raise ContextLengthExceeded(len(ids), model.context_length, param=param, num_new=num_new)
    if lacking := model.lacks(len(ids)):
        raise NeverFits(lacking, param=param)
    for token in ids:
        _check_id(model, token, param)


def _check_id(model: ServedModel, token: int, param: str) -> None:
    check_id(token, model.tokens, param)


def check_id(token: int, tokens: Tokens, param: str) -> None:
    """Raise RequestError for an id that is none of `tokens`."""
    if not 0 <= token < tokens.vocab_size:
        raise RequestError(
            f"{param}: token id {token} is outside the vocabulary of {tokens.vocab_size}", param=param
        )


def _drafted(timings: Sequence[Timings]) -> dict[str, Any]:
    """What came of draft tokens, where anybody drafts."""
    counts = [t.drafts for t in timings]
    if not (counts and counts[0].kind):
        return {}
    summed = DraftCounts(
        counts[0].kind,
        *(sum(getattr(one, name) for one in counts) for name in ("rounds", "proposed", "accepted", "pauses")),
    )
    return {
        "draft_kind": summed.kind,
        "draft_rounds": summed.rounds,
        "draft_n": summed.proposed,
        "draft_n_accepted": summed.accepted,
        "draft_mean_accepted": round(summed.mean_accepted, 3),
        "draft_pauses": summed.pauses,
    }


def _rate(count: int, ms: float) -> float:
    return round(count / ms * 1000, 3) if ms > 0 else 0.0
