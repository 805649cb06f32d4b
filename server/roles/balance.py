"""Which node a request goes to: where its prefix is, unless others have much less to do. Plain values.

As in SGLang's router: prefixes count as long as the nodes are about evenly loaded. Prompts are remembered by the
hashes of their blocks, each of which stands for everything up to it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 16
MAX_BLOCKS = 1 << 17  # that are remembered of one pool
SLACK = 2  # requests that a node may have more than the least loaded one and still be chosen for a prefix


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may be chosen: how many requests it has, of `capacity`, and when it was last chosen."""

    name: str
    load: int
    capacity: int
    chosen_at: int = 0


class Prefixes:
    """Which nodes have which prefixes, as far as is known: those that were sent there lately."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._nodes: OrderedDict[int, str] = OrderedDict()

    def sent(self, salt: Hashable, tokens: Sequence[int], name: str) -> None:
        """The node `name` computes these tokens."""
        for block in _blocks(salt, tokens):
            self._nodes[block] = name
            self._nodes.move_to_end(block)
        while len(self._nodes) > self._max_blocks:
            self._nodes.popitem(last=False)

    def held(self, salt: Hashable, tokens: Sequence[int]) -> dict[str, int]:
        """How many of the first of these tokens each node has, where it has any."""
        held: dict[str, int] = {}
        for number, block in enumerate(_blocks(salt, tokens), start=1):
            if block not in self._nodes:
                break
            held[self._nodes[block]] = number * BLOCK_TOKENS
        return held

    def forget(self, name: str) -> None:
        """The node has nothing any more."""
        for block in [block for block, node in self._nodes.items() if node == name]:
            del self._nodes[block]


def choose(candidates: Sequence[Candidate], held: dict[str, int]) -> Candidate | None:
    """The node for a prompt of which nodes have what is `held`; None: each of them has all that it may.

    The longest prefix goes first among nodes that are not loaded much more than the least, then the least loaded,
    then whoever was not chosen for longest.
    """
    free = [candidate for candidate in candidates if candidate.load < candidate.capacity]
    if not free:
        return None
    least = min(candidate.load for candidate in free)
    near = [candidate for candidate in free if candidate.load <= least + SLACK]
    return min(near, key=lambda one: (-held.get(one.name, 0), one.load, one.chosen_at))


def _blocks(salt: Hashable, tokens: Sequence[int]) -> Iterator[int]:
    """A hash for each whole block, of all tokens up to its end."""
    before = hash(salt)
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        before = hash((before, *tokens[end - BLOCK_TOKENS : end]))
        yield before
