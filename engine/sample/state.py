"""What the sampler step keeps and needs of one row. Plain numbers; no arrays."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.request import Row, Sampling
from engine.sample.dry import Breakers, dry_penalties

_MASK64 = (1 << 64) - 1
_CHANCE = 0x5854435F  # sets what XTC tosses apart from the noise of the same draw


@dataclass(slots=True)
class SamplerState:
    """What a row's draws know beside its tokens. It outlives a preemption.

    `mu` is mirostat's bound on surprise, in bits. `excepted` are the tokens that XTC never removes.
    """

    mu: float
    breakers: Breakers = field(default_factory=dict)
    excepted: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, sampling: Sampling, breakers: Breakers | None = None, excepted: Sequence[int] = ()
    ) -> "SamplerState":
        """The state before the first draw; mirostat begins at twice its target."""
        return cls(2 * sampling.mirostat_tau, breakers or {}, tuple(excepted))

    def observe(self, sampling: Sampling, surprise: float) -> None:
        """Take into account how surprising the drawn token was, in bits: mirostat's feedback.

        A token that could not have been drawn says nothing.
        """
        if math.isfinite(surprise):
            self.mu -= sampling.mirostat_eta * (surprise - sampling.mirostat_tau)


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: the parameters, the two 32-bit words of the noise's key, and what is known of the row's tokens.

    `recent` says how often each recent token came, `dry` what DRY takes off; `mu` and `excepted` are the state's.
    `allowed` is a mask as `grammar.py` makes them; None: every token may be drawn.
    """

    sampling: Sampling
    key: tuple[int, int]
    recent: Mapping[int, int] = field(default_factory=dict)
    dry: Mapping[int, float] = field(default_factory=dict)
    mu: float = 0.0
    excepted: tuple[int, ...] = ()
    allowed: bytes | None = None

    @property
    def chance(self) -> float:
        """A number from 0 to 1, drawn from the key, that the noise does not depend on."""
        return _splitmix64(((self.key[0] << 32 | self.key[1]) ^ _splitmix64(_CHANCE)) & _MASK64) / 2**64


def draw_of(row: Row, ahead: int = 0, allowed: bytes | None = None, *, drafted: Sequence[int] = ()) -> Draw:
    """The draw of `row`'s next token among those `allowed`, or of the one `ahead` places further.

    With `drafted`, that of the token behind these, should the row go on so. It depends on seed, choice, output
    index and the row's own tokens alone, so it is the same in any company and after a resumption.
    """
    sampling = row.request.sampling
    assert not (ahead and row.request.looks_back), "what is drawn by looking back needs every token read"
    key = noise_key(row.seed, row.request.choice, len(row.output) + ahead + len(drafted))
    state: SamplerState = row.sampler or SamplerState.of(sampling)
    output = [*row.output, *drafted] if drafted else row.output
    return Draw(
        sampling,
        key,
        recent=Counter(_window(row, output, sampling.repeat_last_n)) if sampling.penalizes else {},
        dry=dry_penalties(_window(row, output, sampling.dry_penalty_last_n), sampling, state.breakers)
        if sampling.is_dry
        else {},
        mu=state.mu,
        excepted=state.excepted,
        allowed=allowed,
    )


def _window(row: Row, output: list[int], num_tokens: int) -> list[int]:
    """The last `num_tokens` of the row's prompt and `output`, or all of them (-1)."""
    if num_tokens < 0:
        return [*row.request.prompt, *output]
    output = output[-num_tokens:]
    missing = num_tokens - len(output)
    return [*row.request.prompt[-missing:], *output] if missing else output


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
