"""The bodies of OpenAI's raw completions, and what all of its generation dialects share."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from engine.errors import RequestError
from engine.request import Grammar, Loops, Sampling
from server.formats import ResponseFormat, grammar_of
from server.validate import Name

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_BREAKERS = 16
MAX_BREAKER = 40  # characters, as in llama.cpp
MIN_COUNT = 12  # of a loop, where a request does not say

# Fields whose names and values are those of the engine.
SAME_NAMED = (
    "temperature", "top_p", "min_p", "typical_p", "repeat_last_n", "frequency_penalty", "presence_penalty",
    "xtc_probability", "xtc_threshold", "min_keep", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta",
    "seed",
)  # fmt: skip

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Amount = Annotated[float, Meta(ge=0, le=100)]
Window = Annotated[int, Meta(ge=-1)]
Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER)]
LoopSize = Annotated[int, Meta(ge=0, le=512)]
Factor = Annotated[float, Meta(gt=0, le=100)]
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOPS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What all generation dialects of OpenAI share. NEUTRAL are fields of theirs that do not act yet."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "suffix": ("",),
    }

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Amount | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=100)] | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] | None = None
    min_keep: Annotated[int, Meta(ge=0)] | None = None
    repetition_penalty: Factor | None = None
    repeat_penalty: Factor | None = None
    repeat_last_n: Window | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = {}
    dry_multiplier: Amount | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0)] | None = None
    dry_penalty_last_n: Window | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Meta(max_length=MAX_BREAKERS)] | None = None
    dynatemp_range: Amount | None = None
    dynatemp_exponent: Amount | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: Amount | None = None
    mirostat_eta: Share | None = None
    seed: int | None = None
    stop: Stop | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    ignore_eos: bool = False
    max_pattern_size: LoopSize | None = None
    min_pattern_size: LoopSize | None = None
    min_count: Annotated[int, Meta(ge=2, le=1000)] | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    regex: str | None = None
    user: str | None = None
    cache_prompt: bool = True
    cache_salt: Name = ""
    prompt_cache_key: Name = ""

    def check(self) -> None:
        """What the types cannot say. Raises RequestError."""
        self.stops()
        if self.constraint() is not None and self.ignore_eos:
            raise RequestError("ignore_eos: a constrained answer ends where its grammar does", param="ignore_eos")

    def constraint(self) -> Grammar | None:
        """What the answer has to look like, or None. Raises RequestError where two fields say it."""
        return grammar_of(self.response_format, self.grammar, self.regex)

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises RequestError for an empty one, which would stop everything."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise RequestError("stop: an empty string would end every answer before it begins", param="stop")
        return stops

    def sampling(self, default: Sampling) -> Sampling:
        """What was asked over what holds where nothing was; -1 is off for top_k and top_n_sigma, any for seed.

        Raises RequestError where one thing is asked for by two names and differs.
        """
        if (
            None not in (self.repetition_penalty, self.repeat_penalty)
            and self.repetition_penalty != self.repeat_penalty
        ):
            raise RequestError(
                "repetition_penalty and repeat_penalty differ; send one of them", param="repeat_penalty"
            )
        asked: dict[str, Any] = {name: getattr(self, name) for name in SAME_NAMED}
        asked |= {
            "top_k": max(self.top_k, 0) if self.top_k is not None else None,
            "top_n_sigma": max(self.top_n_sigma, 0.0) if self.top_n_sigma is not None else None,
            "repetition_penalty": self.repeat_penalty
            if self.repetition_penalty is None
            else self.repetition_penalty,
            "dry_sequence_breakers": None
            if self.dry_sequence_breakers is None
            else tuple(self.dry_sequence_breakers),
            "logit_bias": tuple(self.logit_bias.items()) or None,
        }
        merged = dataclasses.replace(default, **{name: v for name, v in asked.items() if v is not None})
        return dataclasses.replace(merged, seed=None) if merged.seed == -1 else merged

    def loops(self, default: Loops | None) -> Loops | None:
        """When an answer ends for going round in circles: what was asked over `default`.

        Raises RequestError for bounds of what is not looked for, or of nothing.
        """
        longest = (
            (default.max_tokens if default else 0) if self.max_pattern_size is None else self.max_pattern_size
        )
        if not longest:
            for name in ("min_pattern_size", "min_count"):
                if getattr(self, name) is not None and self.max_pattern_size is None:
                    raise RequestError(f"{name} bounds loops, which max_pattern_size does not ask for", param=name)
            return None
        shortest = (
            (default.min_tokens if default else 1) if self.min_pattern_size is None else self.min_pattern_size
        )
        if shortest > longest:
            raise RequestError("min_pattern_size is above max_pattern_size", param="min_pattern_size")
        count = (default.count if default else MIN_COUNT) if self.min_count is None else self.min_count
        return Loops(max(shortest, 1), longest, count)

    def num_logprobs(self) -> int | None:
        """How many logprobs are wanted in the place of each token, beside its own; None: not even that."""
        return None

    def bound(self) -> int | None:
        """Most new tokens, or None."""
        return self.max_tokens


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`. A prompt is a text, a list of token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: bool | Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = False
    best_of: Count | None = None

    def check(self) -> None:
        """Raises RequestError."""
        super().check()
        if self.logprobs is True:
            raise RequestError("logprobs: a number says how many are wanted for each token", param="logprobs")
        if self.echo and self.logprobs is not False:
            raise RequestError("echo: logprobs are told of new tokens alone, not of the prompt's", param="echo")
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of: every choice is given back here, so only n, {self.n}, is accepted", param="best_of"
            )

    def num_logprobs(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt. Raises RequestError where there is none, or a mixture."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt: there is nothing to continue", param="prompt")
        if len({type(item) for item in prompt}) > 1:
            raise RequestError(
                "prompt: a list holds texts, token ids or lists of ids, not a mixture", param="prompt"
            )
        if isinstance(prompt[0], int):
            return [[item for item in prompt if isinstance(item, int)]]
        return [item for item in prompt if not isinstance(item, int)]
