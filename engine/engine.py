"""The engine: rows and ticks in, events out. It owns the model and the arrays and decides nothing.

Everything here runs on the one thread that loaded the model.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import mlx.core as mx

from engine.adapters.mounts import Adapters
from engine.cache import adapter, dtype
from engine.cache.transfer import Transfer
from engine.config import EngineConfig
from engine.errors import ConfigError, MlxcelError, StepFailed
from engine.finish import FinishStep
from engine.flight import InFlight
from engine.forward import Span
from engine.kernels import functions, native, portable
from engine.language import Language
from engine.model.digest import digest_of
from engine.model.load import LoadedModel, load
from engine.model.store import default_home
from engine.notes import cache_note, context_note, mixing_notes
from engine.opening import Opening
from engine.plan import Held, Piece, PrefillPlan, Tick
from engine.pooling import Pooler, hidden_size
from engine.probe import ChooseForward, Verdict, Verdicts, forward_by
from engine.remembered import Remembered
from engine.request import (
    CacheStats,
    Event,
    Failed,
    Handed,
    Progress,
    Request,
    Row,
    Sampling,
    TokenLogprob,
)
from engine.room import Room
from engine.sample.chain import sample
from engine.sample.force import force
from engine.sample.grammar import Masks
from engine.sample.measure import Measured, measure
from engine.sample.state import Draw, draw_of
from engine.size import AUTO
from engine.speculate.choose import speculation_of
from engine.speculate.drafter import Drafter
from engine.verify import Verifier

log = logging.getLogger(__name__)

ADAPTED = "an adapter is applied to the whole model (--adapter), and none can be mounted beside it"
EMBEDS = "a model that embeds, and continues nothing, has no adapters beside it"
LATER_SHARE = 0.05  # of what rows may take, for adapters that are mounted later: the budget left that free
OVER_RANKS = "a model over several ranks has no adapters beside it"

Sampler = Callable[[mx.array, Sequence[Draw]], mx.array]


class Engine:
    """One model that continues rows. `verdict` is an earlier probe's, if there was one; `drafter` is there where
    `config` has a draft model, and `kernels` says what runs, in words.

    `sampler` is the sampler step; tests put a script in its place. `choose_forward` is given the verdict.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        verdict: Verdict | None = None,
        drafter: Drafter | None = None,
        kernels: str = "portable",
        sampler: Sampler = sample,
        choose_forward: ChooseForward = forward_by,
    ) -> None:
        adapter.self_test()
        adapter.install_attention()
        self.config = config
        self._sample = sampler
        self.vocab_size = loaded.vocab_size
        self.default_sampling: Sampling = config.default_sampling(loaded.sampling)
        self.language = Language.of(
            loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids, config.template_arguments
        )
        self._finish = FinishStep(self.language.tokens.decode, loaded.eos_token_ids)
        self._masks = Masks()
        self._forward, verdict = choose_forward(verdict, loaded.model, loaded.vocab_size)
        if config.cache_dtype != "auto" and not self._forward.stores:
            raise ConfigError(
                "cache_dtype",
                f"cache_dtype {config.cache_dtype} would change nothing: this model's layers keep what they keep "
                "in types of their own",
            )
        compiled = functions.are_used_by(loaded.model) and self._forward.by_handles
        self._forward.cache_dtype = dtype.chosen(config.cache_dtype, compiled=compiled)
        size = hidden_size(self._forward) if verdict.hidden_size is None else verdict.hidden_size
        self.verdict = replace(verdict, hidden_size=size)
        self.pooler = Pooler(loaded.sentence, size)
        self.continues = loaded.continues
        self.num_slots = config.num_slots(batches=self._forward.batches)
        slots = self.num_slots if self._forward.cuts else 1  # what keeps nothing has no context to be split
        self.context_length = config.slot_context(loaded.context_length, slots)
        refusal = ADAPTED if config.adapter else OVER_RANKS if config.ranks else "" if loaded.continues else EMBEDS
        self.adapters = Adapters(loaded.model, self._forward, loaded.vocab_size, refusal=refusal)
        mounted = self.adapters.mount_all(config.mounts, may_miss=config.adapters_may_miss)
        loaded = replace(loaded, weight_bytes=loaded.weight_bytes + self.adapters.num_bytes)
        self._speculation = speculation_of(
            config,
            loaded,
            drafter,
            mode=self._forward.name,
            kernels=kernels,
            memory=Remembered(default_home() / "drafts"),
            sample=lambda logits, draws: self._sample(logits, draws),
        )
        self.drafts = self._speculation.drafts
        self.room = Room(
            loaded,
            config,
            self._forward,
            beside_row=self._speculation.row_bytes,
            mode=verdict.mode,
            num_slots=self.num_slots,
            context_length=self.context_length,
        )
        self.prompts, self.memory, self.storable = self.room.prompts, self.room.memory, self.room.storable
        if config.kv_cache_budget == AUTO and self.storable.budget_bytes is not None:
            self.adapters.leave_room(int(LATER_SHARE * self.storable.budget_bytes))
        self._opening = Opening(
            config,
            self.language,
            self._finish,
            vocab_size=loaded.vocab_size,
            context_length=self.context_length,
            end_tokens=loaded.eos_token_ids,
            embedding=self.pooler.embedding,
            continues=self.continues,
        )
        self._cold_plan = self._plan(lambda row, reproduces: 0)
        self.verifier = Verifier(
            config.verify_cache,
            self._forward,
            self._cold_plan,
            lambda logits, draws: self._sample(logits, draws),
            exact=compiled and self._forward.name == "spans",
            slot=self.adapters.slot,
        )
        # What a row drafts follows from its last token, which a step submitted ahead does not know.
        ahead = mx.default_device() != mx.cpu if config.lookahead is None else config.lookahead
        self._lookahead = ahead and config.drafting == "none"
        self.transfer = Transfer(self._forward, lambda: digest_of(*filter(None, (config.model, config.adapter))))
        self._in_flight: InFlight | None = None
        self._events: list[Event] = []
        self.lookahead_steps = 0
        self.notes = (
            *loaded.notes,
            f"decode path: {verdict.mode} ({verdict.reason})",
            cache_note(self._forward),
            *self.room.notes,
            *mixing_notes(config, self._forward),
            context_note(self.context_length, self.num_slots, config.shared_context(self.num_slots)),
            *(f"adapter: {each}" for each in mounted),
            *filter(None, [self._speculation.note]),
        )

    @classmethod
    def open(cls, config: EngineConfig) -> "Engine":
        """Load the checkpoint that `config` names. Raises ModelError and ConfigError."""
        unfused = portable.prepare(default_home() / "kernels")
        started = "as asked" if config.portable else native.start(config.threads)
        compiled = isinstance(started, native.Native)
        kernels = native.said(started)
        loaded = load(
            config.model,
            trust_remote_code=config.trust_remote_code,
            chat_template=config.chat_template,
            adapter=config.adapter,
            compiled=compiled,
        )
        # What an adapter or a checkpoint's own code does to the layers is not in the verdict's name.
        verdicts = Verdicts(default_home() / "probes")
        keeps = config.adapter is None and not config.trust_remote_code
        known = verdicts.find(config.model, kernels) if keeps else None
        drafter = None
        if config.drafting == "draft" and config.draft_model is not None:
            drafter = Drafter.open(config.draft_model, compiled=compiled, kernels=kernels)
        engine = cls(loaded, config, verdict=known, drafter=drafter, kernels=kernels)
        if keeps and known is None:
            verdicts.keep(config.model, kernels, engine.verdict)
        engine.notes = (f"kernels: {kernels}{unfused}", *engine.notes)
        return engine

    @property
    def cuts_at_turns(self) -> bool:
        """Whether a conversation's prompt is to name where its turns begin: only there can others go on."""
        return self._forward.on_grid and not all(kind.is_attention for kind in self._forward.kinds)

    @property
    def mode(self) -> str:
        """How a batch runs: `spans`, `rows` or `alone`."""
        return self._forward.name

    def plan(self) -> PrefillPlan:
        """The prefill plan that fits this model and configuration."""
        return self._plan(self.prompts.held)

    def _plan(self, held: Held) -> PrefillPlan:
        whole = not self._forward.cuts
        return PrefillPlan(
            fixed_tokens=self.context_length if whole else self.config.prefill_chunk_size,
            on_grid=self._forward.on_grid,
            tokens_per_s=self.verdict.tokens_per_s,
            held=held,
            fits=None if whole else self.room.most_tokens,
            block_tokens=self.prompts.block_tokens,
            keeps_whole=self.prompts.keeps_whole,
            max_batch=self.config.max_batch_prefill,
            max_batch_tokens=self.config.max_batch_prefill_tokens
            or (self.config.prefill_chunk_size if whole else 0),
            mixed_tokens=self.config.mixed_step,
        )

    def submit(self, request: Request) -> Row:
        """A row for `request`, without arrays yet. Raises ContextLengthExceeded, NeverFits, AdapterNotFound, and
        RequestError for a grammar that cannot be compiled, or an answer that has ended where it was begun.
        """
        number = self.adapters.number(request.adapter)
        row = self._opening.row(request, self.memory.lacks(len(request.prompt)), self.drafts.stats().kind)
        row.adapter = number
        return row

    def prefill(self, pieces: Iterable[Piece]) -> list[Event]:
        """Store the pieces; a row whose last piece this is gets its first token."""
        return self.run(Tick(prefill=tuple(pieces)))

    def step(self, rows: Iterable[Row]) -> list[Event]:
        """One more token for each row."""
        return self.run(Tick(decode=tuple(rows)))

    def run(self, tick: Tick) -> list[Event]:
        """Run one forward over the tick's spans, the sampler step and the finish step, or preempt the tick's rows.

        With lookahead, a tick that only decodes submits its forward and returns the events of the one before,
        unless a draw needs the very token that is not read yet.
        """
        if tick.preempt:
            self._preempt(tick.preempt)
            return self._unheard()
        if self._lookahead and not tick.prefill and not any(row.request.looks_back for row in tick.decode):
            self._run_ahead(tick.decode)
            return self._unheard()
        try:
            for piece in tick.prefill:  # first of all: what the plan found in the prompt cache is still there
                self._open(piece.row, piece.start)
        finally:
            self._read()
        pieces = tuple(piece for piece in tick.prefill if piece.start == piece.row.cursor)
        live = tuple(row for row in tick.decode if row.finish_reason is None)
        if pieces or live:
            self._in_flight = self._submit(pieces, live, drafts=self._speculation.tokens(tick))
        events = self.finish_rows()
        if tick.prefill:
            self._give_buffers_back()
        return events

    def finish_rows(self) -> list[Event]:
        """Read the forward in flight, if any, and put its tokens through the finish step."""
        self._read()
        return self._unheard()

    def _read(self) -> None:
        flying = self._in_flight
        if flying is None:
            return
        tokens: list[int] = flying.tokens.tolist()  # type: ignore[assignment]
        self._in_flight = None
        now_s = time.perf_counter()
        for piece in flying.pieces:
            self._events.append(Progress(piece.row, piece.stop, len(piece.row.prefill_tokens)))
            self.prompts.stored(piece.row)
            if piece.is_last and piece.row.pooled is not None:
                self._events.append(self._embedded(piece.row, now_s))
        measured = flying.measures.read(tokens)
        num_taken, at = {}, 0
        for row in flying.rows:
            fault, num_draws = flying.faults.get(row), 1 + len(flying.drafts.get(row, ()))
            if row.finish_reason is None and fault is not None:
                self._events.append(self._fail_row(row, fault))
            drawn = zip(tokens[at : at + num_draws], measured[at : at + num_draws], strict=True)
            num_taken[row] = self._take(row, flying.drafts.get(row, ()), drawn, now_s)
            at += num_draws
        for i, draw, logits in flying.hits:
            self.verifier.take(flying.rows[i], draw, logits, tokens[i])
        for row in flying.rows:
            if row.finish_reason is None:
                self.prompts.stepped(row, num_taken[row])
            else:
                self.prompts.ended(row)
                self.release(row)
        for piece in flying.pieces:
            if piece.is_last and piece.row.request.hands_over and piece.row.finish_reason is None:
                piece.row.is_leaving = True
                self._events.append(Handed(piece.row, self.transfer.departing(piece.row.storage)))

    def _embedded(self, row: Row, now_s: float) -> Event:
        """End a row whose prompt is stored with its vector."""
        try:
            embedded = self.pooler.end(row, now_s)
        except StepFailed as fault:
            return self._fail_row(row, fault)
        row.finish_reason = "stop"
        self.release(row)
        return embedded

    def _take(self, row: Row, draft: Sequence[int], drawn: Iterable[tuple[int, Measured]], now_s: float) -> int:
        """Put what was drawn through the finish step: the row's next token, and those behind tokens of its
        `draft` for as long as these are what it drew. The rest is forgotten. How many tokens are new.

        An accepted token is the row's own draw at its place, so what comes out is what plain steps give.
        """
        if draft:
            row.drafts.add(len(draft), 0)
        num_taken = 0
        for token, measured in drawn:
            if row.finish_reason is not None or (num_taken and row.forced):
                break
            if num_taken:
                row.drafts.accepted += 1
            if measured.surprise is not None:
                row.sampler.observe(row.request.sampling, measured.surprise)
            self._events.append(self._finish_row(row, token, now_s, measured.logprob))
            num_taken += 1
            if num_taken > len(draft) or token != draft[num_taken - 1]:
                break
        if draft and row.storage is not None:
            row.storage.rewind(1 + len(draft) - max(num_taken, 1))
        return num_taken

    def _unheard(self) -> list[Event]:
        """The events that nobody was given yet: those of a step outlive the failure of the next one."""
        events, self._events = self._events, []
        return events

    def _finish_row(self, row: Row, token: int, now_s: float, logprob: TokenLogprob | None) -> Event:
        try:
            return self._finish.finish(row, token, now_s, logprob)
        except MlxcelError as fault:
            return self._fail_row(row, fault)
        except Exception as fault:
            log.exception("the finish step failed for request %s", row.request.id)
            return self._fail_row(row, StepFailed(f"the new token could not be turned into text: {fault}"))

    def _fail_row(self, row: Row, error: MlxcelError) -> Failed:
        row.finish_reason = "cancelled"  # so that no step takes it up again
        self.release(row)
        return Failed(row, error)

    def _preempt(self, rows: Sequence[Row]) -> None:
        """Take the storage of `rows`, once no step in flight holds them; what it had is kept for others, and for
        them when they go on.
        """
        try:
            self._read()
        finally:
            for row in rows:
                if row.finish_reason is None:
                    self._keep(row)
                    self.release(row)
                    row.start_over()

    def _keep(self, row: Row) -> None:
        """Give what `row` has stored to the prompt cache; a fault there is no fault of the row's."""
        try:
            self.prompts.ended(row)
        except Exception:
            log.exception("what request %s had stored could not be kept", row.request.id)

    def _give_buffers_back(self) -> None:
        """Bound what MLX keeps of a prefill forward's buffers for the next, which is of another shape."""
        most_bytes = self.room.piece_bytes
        if most_bytes is not None and mx.get_cache_memory() > most_bytes:
            mx.clear_cache()

    def cancel(self, row: Row) -> None:
        """End `row`; what it has stored is kept for others, but for what a step in flight still writes."""
        row.finish_reason = "cancelled"
        if self._in_flight is None:
            self._keep(row)
        self.release(row)

    def cache_stats(self) -> CacheStats:
        """What the prompt cache holds, and what has happened since the start."""
        return replace(
            self.prompts.stats(),
            verify_checked=self.verifier.num_checked,
            verify_different=self.verifier.num_different,
        )

    def kv_bytes(self, rows: Iterable[Row]) -> int:
        """Bytes of what `rows` keep in the model's layers."""
        if self._forward.pages:
            return self._forward.pages.num_bytes
        return sum(array.nbytes for row in rows if row.storage is not None for array in row.storage.arrays())

    @property
    def storage_backend(self) -> str:
        """How rows keep keys and values: `dense` or `paged`."""
        return "paged" if self._forward.pages else "dense"

    @property
    def kv_blocks(self) -> dict[str, int]:
        """How many blocks there are of each state; none where rows are dense."""
        return self._forward.pages.counts if self._forward.pages else {}

    @property
    def launches(self) -> dict[str, int]:
        """How many forwards went which way."""
        return dict(self._forward.launches.counts)

    def release(self, row: Row) -> None:
        """Free what `row` holds. A step in flight may still read it: it runs before whatever is written next."""
        self._speculation.forget(row)
        if row.storage is not None:
            row.storage.free()
        row.storage = row.pooled = None

    def close(self) -> None:
        """Drop everything; called on the engine's thread."""
        self._in_flight = None
        self.drafts.close()
        self._masks.close()

    def abandon(self) -> tuple[tuple[Row, ...], list[Event]]:
        """Drop the forward in flight after a fault; its rows, whose state is lost, and all events before it."""
        flying, self._in_flight = self._in_flight, None
        rows = () if flying is None else (*(piece.row for piece in flying.pieces), *flying.rows)
        return rows, self._unheard()

    def _submit(
        self,
        pieces: tuple[Piece, ...],
        rows: tuple[Row, ...],
        unread: mx.array | None = None,
        drafts: Mapping[Row, tuple[int, ...]] = MappingProxyType({}),
    ) -> InFlight:
        """Build and submit one forward. `unread` `[len(rows)]` stands for last tokens that are not read yet;
        `drafts` is what some of `rows` go on with, if their draws are that.
        """
        spans, sampled = [], []
        for piece in pieces:
            row, is_sampled = piece.row, _is_sampled(piece)
            tokens = row.prefill_tokens[piece.start : piece.stop]
            slot = self.adapters.slot(row.adapter)
            spans.append(Span(row.storage, tokens, int(is_sampled), pooled=row.pooled, adapter=slot))
            row.cursor = piece.stop
            if is_sampled:
                sampled.append(row)
        for i, row in enumerate(rows):
            draft = drafts.get(row, ())
            last = [*row.output[-1:], *draft] if unread is None else unread[i : i + 1]
            slot = self.adapters.slot(row.adapter)
            spans.append(Span(row.storage, last, num_sampled=1 + len(draft), adapter=slot))
            sampled.append(row)
        masks_of = self._masks.begin(sampled)
        logits = self._forward.run(spans)
        if masks_of and self._lookahead:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        masks, faults = masks_of() if masks_of else ({}, {})
        ahead = 0 if unread is None else 1  # rows that are unread come without pieces
        behind = [(row, at) for row in sampled for at in range(1 + len(drafts.get(row, ())))]
        draws = [draw_of(row, ahead, masks.get(row), drafted=drafts[row][:at] if at else ()) for row, at in behind]
        drawn = (
            force(self._sample(logits, draws), [row for row, _ in behind], draws)
            if sampled
            else mx.zeros((0,), mx.int32)
        )
        measures = measure(logits, drawn, draws, [row.request.top_logprobs for row, _ in behind])
        ended = [piece.row for piece in pieces if _is_sampled(piece)]
        for i, row in enumerate(ended):
            self.prompts.reached(row, logits[i : i + 1])
        hits = tuple(
            (i, draws[i], logits[i])
            for i, row in enumerate(ended)
            if not row.forced and self.verifier.samples(row)
        )
        results = [drawn, *measures.arrays, *(row for _, _, row in hits)]
        results += [array for span in spans for array in span.storage.arrays()]
        results += [array for piece in pieces if piece.row.pooled for array in piece.row.pooled.arrays()]
        if self._lookahead:
            mx.async_eval(results)  # type: ignore[no-untyped-call]
        else:
            mx.eval(results)
        return InFlight(pieces, tuple(sampled), drafts, drawn, measures, hits, faults)

    def _open(self, row: Row, start: int) -> None:
        """Let `row` go on at `start`: with the storage it has, with an empty one, or behind adopted tokens."""
        is_new = not row.started_s
        if is_new:
            row.started_s = time.perf_counter()
        if row.arriving is not None:
            self._land(row)
        elif start > row.cursor:
            self.release(row)
            reproduces = self._cold_plan.reproduces(start, row.request.cuts)
            self.prompts.adopt(row, start, self._forward.open(), reproduces=reproduces)
        elif row.storage is None:
            row.storage = self._forward.open()
        self.pooler.begin(row)
        if is_new:
            self.prompts.begun(row)

    def _land(self, row: Row) -> None:
        """Let `row` go on with what has come with it, or from its start where that cannot be read."""
        arriving, row.arriving = row.arriving, None
        assert arriving is not None, "something has come"
        row.storage = row.storage or self._forward.open()
        try:
            self.transfer.land(arriving, row.storage)
            row.cursor = arriving.state.length
        except Exception:
            log.exception("request %s is computed again: what was handed over cannot be read", row.request.id)
            row.storage.free()
            row.storage = self._forward.open()

    def _run_ahead(self, rows: tuple[Row, ...]) -> None:
        """Submit the next step from the unread tokens of the one in flight, then read that one."""
        flying = self._in_flight
        if flying is None or flying.pieces or not set(rows) <= set(flying.rows):
            self._read()
            live = tuple(row for row in rows if row.finish_reason is None)
            self._in_flight = self._submit((), live) if live else None
            return
        ahead = [
            (i, row)
            for i, row in enumerate(flying.rows)
            if row.finish_reason is None and len(row.output) + 1 < row.limit_tokens
        ]
        following = None
        if ahead:
            unread = flying.tokens[mx.array([i for i, _ in ahead])]
            following = self._submit((), tuple(row for _, row in ahead), unread)
            self.lookahead_steps += 1
        self._read()
        if following is not None and any(row.finish_reason is None for row in following.rows):
            self._in_flight = following


def _is_sampled(piece: Piece) -> bool:
    """Whether a token is drawn behind `piece`."""
    return piece.is_last and piece.row.request.embedding is None
