"""Where one engine's rows keep what they store, dense or paged, and how much they and others may take.

Decided once, when the weights are loaded: the pools, the books that the scheduler asks, the prompt cache, and what
is left for a prefill forward on its way.
"""

from collections.abc import Callable, Iterator

from engine.cache.ledger import BlockLedger, Group, Ledger, Memory, SharedContext, Unbounded
from engine.cache.pages import Pages
from engine.cache.prefix import BLOCK_TOKENS
from engine.cache.prompts import PromptCache
from engine.cache.rows import RowStorage
from engine.cache.sizes import block_bytes, layers_of, paged_row_bytes, row_bytes, token_bytes
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.forward import Forward
from engine.kernels import functions
from engine.model.budget import budget, piece_tokens, transient_of
from engine.model.load import LoadedModel
from engine.model.memory import available_bytes, human_bytes
from engine.request import Row, Storable


class Room:
    """What rows may take (`memory`, which the scheduler asks; `storable`, what is said of it), what is kept for
    others (`prompts`), and the bytes of a prefill forward (`piece_bytes`, None: unbounded).

    `mode` is the probe's name for how the forward runs, `beside_row` what a row of so many tokens takes elsewhere;
    `forward.pages` is set where rows are to be paged. Raises
    ConfigError where what was asked for cannot be.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        forward: Forward,
        *,
        mode: str,
        num_slots: int,
        context_length: int,
        beside_row: Callable[[int], int] = lambda num_tokens: 0,
    ) -> None:
        self._config = config
        self._forward = forward
        self._context_length = context_length
        self._beside_row = beside_row
        compiled = functions.are_used_by(loaded.model)
        storage_note = self._choose_storage(num_slots, compiled=compiled and forward.by_handles)
        self._longest = piece_tokens(config.prefill_chunk_size, on_grid=forward.on_grid)
        self._layers = layers_of(loaded.model, forward.cache_dtype)
        self.transient = transient_of(
            loaded.model, loaded.config, vocab_size=loaded.vocab_size, mode=mode, compiled=compiled
        )
        given = budget(
            config.kv_cache_budget,
            available_bytes(),
            self.transient,
            piece_tokens=self._longest,
            context_tokens=context_length,
            num_rows=num_slots,
        )
        self.piece_bytes = given.piece_bytes
        self.storable = Storable(
            budget_bytes=given.cache_bytes,
            weight_bytes=loaded.weight_bytes,
            token_bytes=token_bytes(self._layers),
            row_bytes=self._row_bytes(context_length),
        )
        self.memory, self.prompts = self._books(given.cache_bytes, loaded.weight_bytes)
        if config.kv_cache_budget.num_bytes is not None and (lacking := self.memory.lacks(1)):
            raise ConfigError("kv_cache_budget", f"the budget has room for no request: {lacking}")
        if (shared := config.shared_context(num_slots)) is not None:
            self.memory = SharedContext(shared, self.memory, watermark=config.kv_admission_watermark)
        self.notes = (f"storage: {storage_note}", self.prompts.note, _memory_note(self.storable))

    def most_tokens(self, start: int) -> int:
        """The longest piece from the position `start` on whose forward fits into what is set aside for it."""
        if self.piece_bytes is None:
            return self._context_length
        return self.transient.most_tokens(start, self.piece_bytes)

    def _choose_storage(self, num_slots: int, *, compiled: bool) -> str:
        """Have rows paged or dense; which, and why."""
        asked, forward = self._config.decode_storage_backend, self._forward
        missing = None
        if not compiled:
            missing = "the compiled kernels do not attend"
        elif forward.name != "spans":
            missing = f"the family decodes in the mode {forward.name}"
        if asked == "paged" and missing:
            raise ConfigError("decode_storage_backend", f"rows cannot be paged: {missing}")
        if not self._config.pages_rows(pageable=missing is None, num_slots=num_slots):
            return f"dense ({missing or ('as asked' if asked == 'dense' else 'one slot')})"
        forward.pages = Pages(forward.kinds, forward.cache_dtype)
        return f"paged (blocks of {BLOCK_TOKENS} tokens)"

    def _row_bytes(self, num_tokens: int) -> int:
        bytes_of = paged_row_bytes if self._forward.pages else row_bytes
        return bytes_of(self._layers, num_tokens, self._longest) + self._beside_row(num_tokens)

    def _books(self, budget_bytes: int | None, weight_bytes: int) -> tuple[Memory, PromptCache]:
        """The books of what rows take, and the prompt cache, whose bytes are in them."""
        config, kinds, pages = self._config, self._forward.kinds, self._forward.pages
        if pages:
            pages.block_bytes = [block_bytes(self._layers, window) for window in pages.windows]
            for blocks, num_bytes in zip(pages.blocks, pages.block_bytes, strict=True):
                blocks.limit = None if budget_bytes is None else budget_bytes // max(num_bytes, 1)
        if budget_bytes is None:
            return Unbounded(), PromptCache(config, kinds, pages=pages)
        beside = f" beside {human_bytes(weight_bytes)} of weights"
        if pages:
            books = BlockLedger(
                budget_bytes,
                list(map(Group, pages.blocks, pages.windows, pages.block_bytes)),
                row_bytes=self._row_bytes,
                piece_tokens=self._longest,
                watermark=config.kv_admission_watermark,
                claims=self._claims,
                accept=lambda row, storage: self.prompts.adopted(row, storage),
                evict=lambda num_bytes: self.prompts.evict(num_bytes),
                beside=beside,
                beside_row=self._beside_row,
            )
            return books, PromptCache(config, kinds, books.spare_for_cache, pages)
        ledger = Ledger(
            budget_bytes,
            self._row_bytes,
            watermark=config.kv_admission_watermark,
            held=lambda: self.prompts.num_bytes,
            evict=lambda num_bytes: self.prompts.evict(num_bytes),
            beside=beside,
        )
        return ledger, PromptCache(config, kinds, ledger.spare_bytes)

    def _claims(self, row: Row) -> Iterator[RowStorage]:
        """Storage for `row` that begins with all it can reuse, with whole blocks of that, and with nothing."""
        held = 0 if row.arriving is not None else self.prompts.held(row, lambda hit: True)
        for num_tokens in dict.fromkeys((held, held // BLOCK_TOKENS * BLOCK_TOKENS, 0)):
            storage = self._forward.open()
            if num_tokens:
                self.prompts.lend(row, num_tokens, storage)
            yield storage


def _memory_note(storable: Storable) -> str:
    if storable.budget_bytes is None:
        return "memory: what is stored is not bounded, as asked"
    return (
        f"memory: {human_bytes(storable.budget_bytes)} for rows and prompt cache, "
        f"{human_bytes(storable.token_bytes)} for each token, {human_bytes(storable.row_bytes)} at most for a row"
    )
