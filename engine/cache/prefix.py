"""Which prefixes are kept: a radix tree over token ids whose edges are whole blocks of 16 tokens.

A block's state is an opaque span; the tree knows its bytes alone, and says which it drops. Any number of rows
borrow the same blocks, and adoption takes nothing away. One budget bounds the bytes: cold blocks go first, leaves
before what they stand on, those that were named lately last, and what is borrowed stays. The tree knows no arrays;
the clock is given.
"""

import bisect
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

BLOCK_TOKENS = 16
UNBOUNDED_BYTES = 1 << 60
NAMED_S = 600.0  # for so long a request that names a key keeps what it uses behind all else

Block = tuple[int, ...]
Spare = Callable[[], int]


@dataclass(eq=False, slots=True)
class Node:
    """One block behind its parent's. A root has no block: it stands for `key` and holds nothing."""

    block: Block = ()
    key: Hashable = None
    parent: "Node | None" = None
    span: Any = None
    num_bytes: int = 0
    num_borrowers: int = 0
    used_s: float = 0.0
    named_s: float = -inf
    children: "dict[Block, Node]" = field(default_factory=dict)


@dataclass(slots=True)
class Loan:
    """Blocks that stay until the loan is released, in the order of their tokens; of the last, a part may count."""

    nodes: tuple[Node, ...]
    released: bool = False

    @property
    def spans(self) -> list[Any]:
        return [node.span for node in self.nodes]


class PrefixTree:
    """Blocks by the key (whose they are) and the tokens that lead to them.

    `num_bytes` never exceeds `budget_bytes`, and never grows by more than the bytes that `spare` says are free;
    what is dropped here is free there at once. A block unused for `ttl_s` seconds is dropped when the tree is next
    touched. Keys never share blocks.
    """

    def __init__(
        self,
        budget_bytes: int,
        ttl_s: float = inf,
        *,
        clock: Callable[[], float] = time.monotonic,
        dropped: Callable[[Any], None] = lambda span: None,
        gains: Callable[[Any], bool] = lambda span: True,
        spare: Spare = lambda: UNBOUNDED_BYTES,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._spare = spare
        self._ttl_s = ttl_s
        self._clock = clock
        self._dropped = dropped
        self._gains = gains
        self.num_bytes = 0
        self.num_evicted = 0
        self.num_expired = 0
        self._roots: dict[Hashable, Node] = {}
        # Least recently used first. A path is touched from its end, so that a block stands behind those on it.
        self._order: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return len(self._order)

    @property
    def num_borrowed(self) -> int:
        """How many blocks are on loan."""
        return sum(node.num_borrowers > 0 for node in self._order)

    def held(self, key: Hashable, tokens: Sequence[int], *, in_part: bool = False) -> int:
        """How many of `tokens`, from the first, are held in whole blocks. Counts as no use.

        `in_part` counts those as well that the next block begins with.
        """
        self.expire()
        path = self._path(key, tokens)
        count = len(path) * BLOCK_TOKENS
        if not in_part:
            return count
        return count + _num_same_behind(self._end(key, path), tuple(tokens[count : count + BLOCK_TOKENS]))

    def borrow(self, key: Hashable, tokens: Sequence[int], *, named: bool = False) -> Loan:
        """The blocks held of `tokens`, which stay until `release`; none is no error.

        Where `tokens` end within a block, one that begins so is among them. `named`: evict them after those that
        were not, for `NAMED_S` seconds.
        """
        self.expire()
        path = self._path(key, tokens)
        end, rest = self._end(key, path), tuple(tokens[len(path) * BLOCK_TOKENS :])
        if end and 0 < len(rest) < BLOCK_TOKENS:
            path += [child for block, child in end.children.items() if block[: len(rest)] == rest][:1]
        self._touch(path, named)
        for node in path:
            node.num_borrowers += 1
        return Loan(tuple(path))

    def release(self, loan: Loan) -> None:
        """Give a loan back."""
        assert not loan.released, "a loan is released once"
        loan.released = True
        for node in loan.nodes:
            node.num_borrowers -= 1

    def insert(
        self,
        key: Hashable,
        tokens: Sequence[int],
        block_bytes: int,
        take: Callable[[int, int], Sequence[Any]],
        *,
        first: int = 0,
        named: bool = False,
    ) -> int:
        """Hold the whole blocks of `tokens` that are not held, as far as the budget allows; how many were added.

        `take(start, stop)` gives the spans of these tokens, `block_bytes` each; it can give none from before the
        token `first`. It is called once, after cold blocks have made room, and not where nothing is missing.
        `named` is that of `borrow`.
        """
        self.expire()
        path = self._path(key, tokens)
        self._touch(path, named)
        start = len(path) * BLOCK_TOKENS
        missing = len(tokens) // BLOCK_TOKENS - len(path)
        if missing <= 0 or start < first:
            return 0
        fitting = self._make_room(missing, block_bytes, keep=path)
        if not fitting:
            return 0
        spans = take(start, start + fitting * BLOCK_TOKENS)
        assert len(spans) == fitting, "there is one span for each block"
        end = path[-1] if path else self._roots.setdefault(key, Node(key=key))
        now_s = self._clock()
        for block, span in zip(_blocks(tokens[start:]), spans, strict=False):
            node = Node(block, parent=end, span=span, num_bytes=block_bytes, used_s=now_s)
            end.children[block] = node
            self._order[node] = None
            self.num_bytes += block_bytes
            path.append(node)
            end = node
        self._touch(path, named)
        return fitting

    def divergence(self, key: Hashable, tokens: Sequence[int]) -> int | None:
        """Index of the first token that differs from what is held and goes on; None where nothing differs.

        None as well where not even the first token is the same.
        """
        path = self._path(key, tokens)
        at = len(path) * BLOCK_TOKENS
        end = self._end(key, path)
        ahead = tuple(tokens[at : at + BLOCK_TOKENS])
        if end is None or not end.children or not ahead:
            return None
        same = _num_same_behind(end, ahead)
        return at + same if same < len(ahead) and at + same > 0 else None

    @property
    def spans(self) -> list[Any]:
        """Those of every block that is held."""
        return [node.span for node in self._order]

    def expire(self) -> None:
        """Drop what was not used for too long."""
        before_s = self._clock() - self._ttl_s
        while (node := self._coldest()) is not None and node.used_s < before_s:
            self._drop(node)
            self.num_expired += 1

    def evict(self, num_bytes: int) -> int:
        """Drop cold blocks, those that it gains something to drop, until it was so many bytes or none is left.

        The bytes of what was dropped.
        """
        before = self.num_bytes
        while before - self.num_bytes < num_bytes and self._evict_one(self._gains):
            pass
        return before - self.num_bytes

    def expires_in_s(self) -> float:
        """How long until `expire` has something to drop if nothing is used until then; infinite where never."""
        coldest = self._coldest()
        return inf if coldest is None else max(0.0, coldest.used_s + self._ttl_s - self._clock())

    def clear(self) -> int:
        """Drop everything that nobody borrows; the bytes that this freed."""
        before = self.num_bytes
        while (node := self._coldest()) is not None:
            self._drop(node)
        return before - self.num_bytes

    def check(self) -> None:
        """Bytes and blocks are what the tree holds, within the budget; whoever is borrowed stands on borrowed."""
        reached: list[Node] = []
        places = {node: place for place, node in enumerate(self._order)}
        for root in self._roots.values():
            assert root.children, "a root outlived its blocks"
            waiting = [root]
            while waiting:
                node = waiting.pop()
                for block, child in node.children.items():
                    assert child.parent is node, "a block's parent is another"
                    assert child.block == block, "a block lies under another's name"
                    assert len(block) == BLOCK_TOKENS, "a block is not whole"
                    if node is not root:
                        assert node.num_borrowers >= child.num_borrowers, "a borrowed block stands on none"
                        assert places[node] > places[child], "a block is colder than one that stands on it"
                        assert node.used_s >= child.used_s, "a block is older than one that stands on it"
                        assert node.named_s >= child.named_s, "a named block stands on one that is not"
                    waiting.append(child)
                    reached.append(child)
        assert set(reached) == set(self._order), "a block is lost"
        assert all(node.num_borrowers >= 0 for node in reached), "a block was given back twice"
        assert self.num_bytes == sum(node.num_bytes for node in reached), "the bytes are not those of the blocks"
        assert self.num_bytes <= self.budget_bytes, "the budget is exceeded"

    def _path(self, key: Hashable, tokens: Sequence[int]) -> list[Node]:
        path: list[Node] = []
        node: Node | None = self._roots.get(key)
        for block in _blocks(tokens):
            node = node.children.get(block) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def _end(self, key: Hashable, path: Sequence[Node]) -> Node | None:
        """What goes on behind `path`."""
        return path[-1] if path else self._roots.get(key)

    def _touch(self, path: Sequence[Node], named: bool) -> None:
        now_s = self._clock()
        for node in reversed(path):
            node.used_s = now_s
            node.named_s = now_s if named else node.named_s
            self._order.move_to_end(node)

    def _make_room(self, num_blocks: int, block_bytes: int, keep: Sequence[Node]) -> int:
        """Evict cold blocks until `num_blocks` more fit, or no more can go; how many fit. `keep` stays."""
        for node in keep:
            node.num_borrowers += 1
        while self._room() < num_blocks * block_bytes and self._evict_one():
            pass
        for node in keep:
            node.num_borrowers -= 1
        return min(num_blocks, max(self._room(), 0) // block_bytes)

    def _room(self) -> int:
        return min(self.budget_bytes - self.num_bytes, self._spare())

    def _evict_one(self, gains: Callable[[Any], bool] = lambda span: True) -> bool:
        """Drop what makes room first, of what it `gains` something to drop; whether there was any."""
        leaving = self._first_out(gains)
        if leaving is None:
            return False
        self._drop(leaving)
        self.num_evicted += 1
        return True

    def _first_out(self, gains: Callable[[Any], bool]) -> Node | None:
        """The coldest that nobody has named lately, else the coldest."""
        since_s = self._clock() - NAMED_S
        unnamed = (node for node in self._free() if node.named_s < since_s and gains(node.span))
        return next(unnamed, None) or next((node for node in self._free() if gains(node.span)), None)

    def _coldest(self) -> Node | None:
        """The least recently used block that nobody borrows."""
        return next(self._free(), None)

    def _free(self) -> Iterator[Node]:
        """What nobody borrows and nothing stands on, the least recently used first."""
        return (node for node in self._order if not node.num_borrowers and not node.children)

    def _drop(self, node: Node) -> None:
        assert not node.children, "only leaves are dropped"
        assert node.parent is not None, "a root is not kept as a block"
        del node.parent.children[node.block]
        del self._order[node]
        self.num_bytes -= node.num_bytes
        self._dropped(node.span)
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.parent.key]


def _blocks(tokens: Sequence[int]) -> Iterator[Block]:
    """The whole blocks of `tokens`."""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        yield tuple(tokens[start : start + BLOCK_TOKENS])


def _num_same_behind(end: Node | None, ahead: Block) -> int:
    """How many tokens of `ahead` one of the blocks behind `end` begins with, the most."""
    return max((num_same(ahead, block) for block in end.children), default=0) if end else 0


def num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences of the same type begin with alike."""
    shorter = min(len(one), len(other))
    return bisect.bisect_left(range(shorter), True, key=lambda i: one[: i + 1] != other[: i + 1])
