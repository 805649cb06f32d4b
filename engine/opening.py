"""A request into a row: its bounds, its seed, and what finish step and sampler step know of it. No arrays."""

import secrets
import time

from engine.config import EngineConfig
from engine.errors import ContextLengthExceeded, EmbeddingsOnly, NeverFits, NoEmbeddings, RequestError
from engine.finish import FinishStep
from engine.language import Language
from engine.request import DraftCounts, Embedding, Request, Row, Sampling
from engine.sample.state import SamplerState


class Opening:
    """Opens the rows of one engine. `vocab_size` are the rows of its logits. `embedding` is the longest vector
    that it gives, None: none; `continues`: it continues prompts.
    """

    def __init__(
        self,
        config: EngineConfig,
        language: Language,
        finish: FinishStep,
        *,
        vocab_size: int,
        context_length: int,
        end_tokens: frozenset[int],
        embedding: Embedding | None,
        continues: bool,
    ) -> None:
        self._config = config
        self._language = language
        self._finish = finish
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._end_tokens = end_tokens
        self._embedding = embedding
        self._continues = continues

    def row(self, request: Request, lacking: str | None, draft_kind: str) -> Row:
        """A row for `request`. Raises ContextLengthExceeded, NeverFits with what it is `lacking`, and RequestError
        for a grammar that cannot be compiled, or an answer that has ended where it was begun; NoEmbeddings and
        EmbeddingsOnly.
        """
        num_prompt, num_new = len(request.prompt), int(request.embedding is None)
        if num_prompt + num_new > self._context_length:
            raise ContextLengthExceeded(num_prompt, self._context_length, num_new=num_new)
        if lacking:
            raise NeverFits(lacking)
        assert num_prompt > 0, "an empty prompt is refused before"
        assert all(0 <= token < self._vocab_size for token in request.prompt), "prompt ids are checked before"
        if request.embedding is not None:
            return self._embedded(request, request.embedding)
        if not self._continues:
            raise EmbeddingsOnly("the model gives embeddings and continues nothing")
        bounds = [self._context_length - num_prompt]
        if request.max_tokens is not None:
            bounds.append(request.max_tokens)
        elif self._config.n_predict >= 0:
            bounds.append(self._config.n_predict)
        seed, grammar = request.sampling.seed, request.grammar
        row = Row(
            request=request,
            limit_tokens=min(bounds),
            seed=secrets.randbits(64) if seed is None else seed,
            text=self._finish.open(request),
            sampler=self._sampler_state(request.sampling),
            drafts=DraftCounts(draft_kind),
            constraint=None if grammar is None else self._language.grammars.open(grammar),
        )
        self._finish.begin(row)
        if request.resumed is not None:
            self._resume(row)
        return row

    def _embedded(self, request: Request, asked: Embedding) -> Row:
        """A row that gives a vector and no tokens."""
        if self._embedding is None:
            raise NoEmbeddings("the model gives no embeddings")
        assert 0 < asked.num_dimensions <= self._embedding.num_dimensions, "dimensions are checked before"
        return Row(request=request, limit_tokens=0, seed=0, text=None)

    def _resume(self, row: Row) -> None:
        resumed = row.request.resumed
        assert resumed is not None, "the row began elsewhere"
        if any(not 0 <= token < self._vocab_size for token in resumed.output):
            raise RequestError("an answer that goes on has tokens that are none of the model's")
        if not self._finish.resume(row, resumed, time.perf_counter()):
            raise RequestError("an answer that has ended cannot go on")
        if resumed.mu is not None:
            row.sampler.mu = resumed.mu

    def _sampler_state(self, sampling: Sampling) -> SamplerState:
        """What is known of the vocabulary, for the stages that ask for it."""
        tokens = self._language.tokens
        breakers = tokens.breakers(sampling.dry_sequence_breakers) if sampling.is_dry else {}
        excepted: list[int] = []
        if sampling.xtc_probability > 0:
            broken = tokens.encode("\n", False)
            excepted = [*sorted(self._end_tokens), *(i for i in broken if b"\n" in tokens.spell(i))]
        return SamplerState.of(sampling, breakers, excepted)
