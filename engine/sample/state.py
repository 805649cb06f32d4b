"""What the sampler step keeps and needs of one row. Plain numbers; no arrays."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.request import Row, Sampling

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: the parameters, the two 32-bit words of the noise's key, and how often each recent token came.

    `allowed` is a mask as `grammar.py` makes them; None: every token may be drawn.
    """

    sampling: Sampling
    key: tuple[int, int]
    recent: Mapping[int, int] = field(default_factory=dict)
    allowed: bytes | None = None


def draw_of(row: Row, ahead: int = 0, allowed: bytes | None = None) -> Draw:
    """The draw of `row`'s next token among those `allowed`, or of the one `ahead` places further.

    It depends on seed, choice, output index and the row's own tokens alone, so it is the same in any company and
    after a resumption.
    """
    sampling = row.request.sampling
    assert not (ahead and row.request.looks_back), "what is drawn by looking back needs every token read"
    key = noise_key(row.seed, row.request.choice, len(row.output) + ahead)
    return Draw(sampling, key, _recent(row) if sampling.looks_back else {}, allowed)


def _recent(row: Row) -> Counter[int]:
    """Counts over the last `repeat_last_n` tokens of prompt and output."""
    wanted = row.request.sampling.repeat_last_n
    if wanted < 0:
        return Counter(row.request.prompt) + Counter(row.output)
    output = row.output[-wanted:]
    missing = wanted - len(output)
    return Counter(output) + Counter(row.request.prompt[-missing:] if missing else ())


def noise_key(seed: int, choice: int, index: int) -> tuple[int, int]:
    """Fold choice and output index into the seed: two 32-bit words (SplitMix64, Steele et al. 2014)."""
    state = seed & _MASK64
    for part in (choice, index):
        state = _splitmix64((state ^ _splitmix64(part)) & _MASK64)
    return state >> 32, state & 0xFFFFFFFF


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
