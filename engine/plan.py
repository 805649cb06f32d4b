"""The one prefill plan: how a prompt is cut into pieces, and the Tick that carries them.

Scheduler and engine meet here and in `request.py`; neither imports the other. No arrays, no clock.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from engine.request import Row

GRID_TOKENS = 256  # where cuts change bits, pieces end on multiples of this position
ROUND_TOKENS = 16
ALONE_S, ALONE_MAX_TOKENS = 1.0, 2048  # a piece while nothing decodes
SHARED_S, SHARED_MAX_TOKENS = 0.25, 512  # a piece while rows decode

Held = Callable[[Row, Callable[[int], bool]], int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop` of what one row prefills, to be stored in one forward.

    Those between the row's cursor and `start`, if any, are adopted first.
    """

    row: Row
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether nothing is left to prefill, so that this piece yields the next token."""
        return self.stop == len(self.row.prefill_tokens)


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that `row` may go on with behind its last one; one forward verifies them all.

    Where the `num_tokens` of them are not given, the engine's draft model has them. Those that are not `verified`
    are only looked at.
    """

    row: Row
    num_tokens: int
    tokens: tuple[int, ...] = ()
    verified: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """What one forward does: prefill pieces, decode rows, or both. `drafts` are of rows that decode. `preempt` are
    rows that give their storage back and wait; a tick with such rows does nothing else, so that what is planned
    rests on what was freed.
    """

    prefill: tuple[Piece, ...] = ()
    decode: tuple[Row, ...] = ()
    preempt: tuple[Row, ...] = ()
    drafts: tuple[Draft, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*(piece.row for piece in self.prefill), *self.decode)

    @property
    def prefill_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.prefill)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode or self.preempt)


class PrefillPlan:
    """Cuts prompts into pieces of the size in force.

    The size is the one given (`fixed_tokens` > 0), or comes from the measured rate, so that a piece takes about
    a second when nothing else runs and a quarter of one while rows decode. With `on_grid`, for model families
    whose arithmetic depends on the cut, pieces end at fixed positions and at the row's `cuts` whatever else
    runs, and so does what is adopted. `held` says how many of a row's tokens others have stored by now, up to a
    place where going on reproduces the cold plan, and `block_tokens` in which steps that number grows (0: none).
    With `keeps_whole` it grows at the last two `cuts` of a prompt alone, to all of an equal one: that row's next
    piece has no tokens, and yields what comes next all the same.

    `fits` says how many tokens a piece that begins at a position may have for its forward to stay within the
    memory set aside for it. On the grid that bounds nothing: other cuts would be other results.

    One forward takes the pieces of at most `max_batch` prompts, which are together at most `max_batch_tokens` long
    where they are several (0: no further bound). With `mixed_tokens`, pieces and the decode rows beside them have
    that many tokens in one forward.
    """

    def __init__(
        self,
        *,
        fixed_tokens: int = 0,
        on_grid: bool = False,
        tokens_per_s: float = 0.0,
        held: Held = lambda row, reproduces: 0,
        fits: Callable[[int], int] | None = None,
        block_tokens: int = 0,
        keeps_whole: bool = False,
        max_batch: int = 0,
        max_batch_tokens: int = 0,
        mixed_tokens: int = 0,
    ) -> None:
        self._fixed_tokens = fixed_tokens
        self._grid_tokens = (fixed_tokens or GRID_TOKENS) if on_grid else 0
        self._tokens_per_s = tokens_per_s
        self._held = held
        self._fits = fits
        self._block_tokens = block_tokens
        self._keeps_whole = keeps_whole
        self._max_batch = max_batch
        self._max_batch_tokens = max_batch_tokens
        self._mixed_tokens = mixed_tokens

    @property
    def mixes(self) -> bool:
        """Whether pieces and decode rows share forwards. On a grid a piece cannot be cut to what is left."""
        return self._mixed_tokens > 0 and not self._grid_tokens

    def reproduces(self, hit: int, cuts: Collection[int] = ()) -> bool:
        """Whether going on behind `hit` adopted tokens gives the bits of the prompt computed from its start."""
        return not self._grid_tokens or hit % self._grid_tokens == 0 or hit in cuts

    def start(self, row: Row) -> int:
        """Where the next piece of `row` begins: at its cursor, or behind what can be adopted now."""
        if row.arriving is not None:
            return row.arriving.state.length
        return max(row.cursor, self._held(row, lambda hit: self.reproduces(hit, row.request.cuts)))

    def waits(self, row: Row, ahead: Iterable[Row]) -> bool:
        """Whether one of those `ahead` is about to come to a place where `row` can take all that it has stored, so
        that it need not be computed twice.
        """
        return self._keeps_whole and any(self._comes_to(other, row) for other in ahead)

    def _comes_to(self, other: Row, row: Row) -> bool:
        """Whether `other` will be kept whole at a place that `row` can begin from, behind where it is now."""
        one, two = row.request, other.request
        if row.cursor > other.cursor or not row.shares_with(other):
            return False
        tokens, others = row.prefill_tokens, other.prefill_tokens
        for stop in two.cuts[-2:]:
            whole = stop == len(tokens)
            if not other.cursor < stop <= len(tokens) or (whole and stop < len(two.prompt)):
                continue
            same_cuts = [cut for cut in one.cuts if cut <= stop] == [cut for cut in two.cuts if cut <= stop]
            if same_cuts and tokens[:stop] == others[:stop] and stop > self.start(row):
                return True
        return False

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Take the duration of a forward over prompts, and any decode rows beside them, into account.

        That of a few tokens says little of the rate.
        """
        if seconds <= 0 or num_tokens < ROUND_TOKENS:
            return
        rate = num_tokens / seconds
        self._tokens_per_s = (self._tokens_per_s + rate) / 2 if self._tokens_per_s else rate

    def budget(self, *, decoding: bool, beside: int = 0) -> int:
        """The piece in force: most prompt tokens that one forward may take now, over all its pieces.

        `beside` counts the decode rows in the same forward.
        """
        if self._grid_tokens or self._fixed_tokens:
            in_force = self._grid_tokens or self._fixed_tokens
        else:
            seconds, most = (SHARED_S, SHARED_MAX_TOKENS) if decoding else (ALONE_S, ALONE_MAX_TOKENS)
            by_time = int(self._tokens_per_s * seconds) // ROUND_TOKENS * ROUND_TOKENS
            in_force = min(max(by_time, ROUND_TOKENS), most)
        return min(in_force, max(self._mixed_tokens - beside, ROUND_TOKENS)) if beside else in_force

    def piece(self, row: Row, budget_tokens: int) -> Piece:
        """The next piece of what `row` prefills, of at most `budget_tokens`."""
        assert not row.prefilled, "a row that decodes has no next piece"
        start = self.start(row)
        stop = start + budget_tokens
        if self._grid_tokens:
            stop = (start // self._grid_tokens + 1) * self._grid_tokens
            stop = min([stop, *(cut for cut in row.request.cuts if cut > start)])
        elif self._fits is not None:
            stop = min(stop, start + max(self._fits(start), 1))
        return Piece(row, start, min(stop, len(row.prefill_tokens)))

    def pieces(self, rows: list[Row], *, decoding: bool, beside: int = 0) -> tuple[Piece, ...]:
        """Pieces of several rows for one forward: the first takes what it can of the budget.

        A further row joins only with all that is left of its prompt, since a sliver of it would cost it its turn,
        and only if it could not adopt next time what this forward stores.
        """
        budget = self.budget(decoding=decoding, beside=beside)
        taken = [self.piece(rows[0], budget)]
        left = min(budget, self._max_batch_tokens or budget) - taken[0].num_tokens
        for row in rows[1:]:
            if left <= 0 or len(taken) == self._max_batch:
                break
            piece = self.piece(row, left)
            if not piece.is_last or piece.num_tokens > left or any(self._shares(piece, one) for one in taken):
                continue
            taken.append(piece)
            left -= piece.num_tokens
        return tuple(taken)

    def _shares(self, piece: Piece, taken: Piece) -> bool:
        """Whether the next block of `piece` is one that `taken` stores, so that its row can adopt it then."""
        if not self._block_tokens or piece.start != taken.start:
            return False
        if not piece.row.shares_with(taken.row):
            return False
        step = self._grid_tokens or self._block_tokens
        end = (piece.start // step + 1) * step
        tokens, others = piece.row.prefill_tokens, taken.row.prefill_tokens
        return end <= taken.stop and end < len(tokens) and tokens[:end] == others[:end]
