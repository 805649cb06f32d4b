"""What the sampler step keeps and needs of one row. Plain numbers; no arrays."""

from dataclasses import dataclass

from engine.request import Row, Sampling

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: the parameters and the two 32-bit words of the noise's key."""

    sampling: Sampling
    key: tuple[int, int]


def draw_of(row: Row, ahead: int = 0) -> Draw:
    """The draw of `row`'s next token, or of the one `ahead` places further.

    It depends on seed, choice and output index alone, so it is the same in any company and after a resumption.
    """
    return Draw(row.request.sampling, noise_key(row.seed, row.request.choice, len(row.output) + ahead))


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
