"""How many bytes rows and prompt cache may take, and how long a prefill piece may be to fit beside them.

What a forward takes on its way is estimated from the shapes of the weights, upwards where in doubt; a scan written
by hand may still take more. Evaluates nothing; how much memory is free is given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.plan import ALONE_MAX_TOKENS, GRID_TOKENS, ROUND_TOKENS
from engine.probe import BY_HANDLES
from engine.size import Bound

SHARE = 0.9  # of what is free: the rest is for the operating system, Python, and what the estimates miss
PIECE_SHARE = 0.25  # of what is free, at most, for a prefill piece
FLOAT_BYTES = 4
# How often something is there at once, found by measuring peaks over families of every kind, and rounded up.
OUTPUT_COPIES = 8  # a block's outputs, what norms and gates make of them, and those of blocks begun early
SCORE_COPIES = 2  # attention's scores, and their softmax
OWN_SCORE_COPIES = 5  # the same where the model computes and masks them itself
SCAN_COPIES, SCAN_TOKENS = 6, 256  # mlx-lm's state-space scans go over so many tokens at once, pair by pair
SCAN_HEADS = ("mamba_n_heads", "mamba_num_heads", "num_heads")
LOGIT_COPIES = 4  # the logits, and what the sampler sorts
EXPERTS = 8  # that a token is given to, where the configuration does not say
FUSED_HEAD_DIMS = (64, 80, 128)  # for which a GPU attends without keeping the scores of a prompt


@dataclass(frozen=True, slots=True)
class Transient:
    """What one prefill forward takes on its way, in bytes: for each of its tokens, for each pair of a token and
    one that it sees, and for each row that gets logits.

    `token_bytes` are the outputs of all layers of the widest block, as if none were freed before its end, and some
    copies of them; blocks run one after the other. `pair_bytes` are attention's scores, 0 where it keeps none.
    """

    token_bytes: int
    pair_bytes: int
    logit_bytes: int

    def bytes_of(self, start: int, num_tokens: int) -> int:
        """A piece of `num_tokens` that begins at the position `start`, but for its logits."""
        return num_tokens * (self.token_bytes + (start + num_tokens) * self.pair_bytes)

    def most_tokens(self, start: int, num_bytes: int) -> int:
        """The longest piece, in whole rounds, that begins at `start` and takes no more than `num_bytes`; one at
        least."""
        fitting, too_long = 1, 2
        while self.bytes_of(start, too_long * ROUND_TOKENS) <= num_bytes and too_long < 1 << 16:
            fitting, too_long = too_long, 2 * too_long
        while too_long - fitting > 1:
            middle = (fitting + too_long) // 2
            if self.bytes_of(start, middle * ROUND_TOKENS) <= num_bytes:
                fitting = middle
            else:
                too_long = middle
        return fitting * ROUND_TOKENS


def transient_of(
    model: Any, config: Mapping[str, Any], *, vocab_size: int, mode: str | None, compiled: bool
) -> Transient:
    """The estimate for `model`, whose checkpoint says `config` and which runs in `mode`, None: not known yet.

    `compiled` says whether the kernels are used; they attend in `spans` alone when a prompt is stored.
    """
    said = {**config, **(config.get("text_config") or {})}
    experts = int(said.get("num_experts_per_tok") or EXPERTS)
    widths: dict[str, int] = {}
    value_bytes = [FLOAT_BYTES] if compiled else []
    for name, module in model.named_modules():
        block = _block(name)
        if block and isinstance(module.get("weight"), mx.array):
            widths[block] = widths.get(block, 0) + _width(module.weight, experts)
            value_bytes += [module.weight.dtype.size] if module.weight.ndim == 1 else []
    heads = int(said.get("num_attention_heads") or 0)
    scan_heads = next((int(said[name]) for name in SCAN_HEADS if isinstance(said.get(name), int)), 0)
    outputs = max(value_bytes, default=FLOAT_BYTES) * OUTPUT_COPIES * max(widths.values(), default=0)
    return Transient(
        token_bytes=outputs + FLOAT_BYTES * SCAN_COPIES * SCAN_TOKENS * scan_heads,
        pair_bytes=FLOAT_BYTES * heads * _score_copies(said, heads, mode, compiled),
        logit_bytes=FLOAT_BYTES * LOGIT_COPIES * vocab_size,
    )


def _score_copies(said: Mapping[str, Any], heads: int, mode: str | None, compiled: bool) -> int:
    if mode not in (None, *BY_HANDLES):
        return OWN_SCORE_COPIES
    head_dim = said.get("head_dim") or (said.get("hidden_size") or 0) // max(heads, 1)
    fused = mx.default_device() != mx.Device(mx.cpu) and head_dim in FUSED_HEAD_DIMS
    return 0 if fused or (compiled and mode == "spans") else SCORE_COPIES


def _block(name: str) -> str:
    """The block that a module of this name is in: the name up to its first number, or none."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _width(weight: mx.array, experts: int) -> int:
    """How many values a layer with this weight puts out for a token: a vector scales, a matrix multiplies, and of
    a stack of matrices some experts do (a convolution's is no wider than that)."""
    if weight.ndim == 3:
        return min(weight.shape[0], experts) * weight.shape[1]
    return int(weight.shape[0])


@dataclass(frozen=True, slots=True)
class Budget:
    """`cache_bytes` for rows and prompt cache together, None: unbounded; `piece_bytes` for the tokens of a prefill
    forward, None: unbounded.
    """

    cache_bytes: int | None
    piece_bytes: int | None


def piece_tokens(asked: int, *, on_grid: bool) -> int:
    """The longest prefill piece that a plan can ask for; `asked` is the setting, 0: not given."""
    return asked or (GRID_TOKENS if on_grid else ALONE_MAX_TOKENS)


def budget(
    asked: Bound,
    free_bytes: int,
    transient: Transient,
    *,
    piece_tokens: int,
    context_tokens: int,
    num_rows: int,
) -> Budget:
    """What is set aside of `free_bytes`, with the weights loaded.

    A forward gets what a piece of `piece_tokens` at the context's end may take, if that is no more than a quarter
    of all, and in any case what the shortest takes. Rows and prompt cache get what was `asked` for, or nine tenths
    of all less what the forward gets and the logits of all rows.
    """
    if asked == "none":
        return Budget(None, None)
    longest = min(piece_tokens, context_tokens)
    wanted = transient.bytes_of(context_tokens - longest, longest)
    least = transient.bytes_of(context_tokens, ROUND_TOKENS)
    piece_bytes = max(least, min(wanted, int(PIECE_SHARE * free_bytes)))
    if asked.num_bytes is not None:
        return Budget(asked.num_bytes, piece_bytes)
    return Budget(max(int(SHARE * free_bytes) - piece_bytes - num_rows * transient.logit_bytes, 0), piece_bytes)
