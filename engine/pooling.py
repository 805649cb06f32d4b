"""What the hidden states in front of the output head come to: one vector for each prompt.

Rows give them piece by piece, in the same forwards as everything else. Sums are taken token by token, so that the
vector does not depend on how a prompt was cut; on a GPU, whose sums are trees, it does in its last bits.
"""

import mlx.core as mx

from engine.errors import StepFailed
from engine.forward import Forward, HeadNotFound, Span
from engine.model.sentence import Sentence
from engine.request import Embedded, Embedding, Pooling, Row

SMALLEST = 1e-12  # length of a vector that is divided by its length


class Pooled:
    """What one row's hidden states come to so far: the first or the last, or the sum of all, in float32."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._num_tokens = 0
        self._kept: mx.array | None = None

    def take(self, hidden: mx.array) -> None:
        """Those of the next tokens, `[n, size]`."""
        rows = hidden.astype(mx.float32)
        if self._pooling == "last":
            self._kept = rows[-1]
        elif self._pooling == "cls":
            self._kept = rows[0] if self._kept is None else self._kept
        else:
            before = [] if self._kept is None else [self._kept[None]]
            self._kept = mx.cumsum(mx.concatenate([*before, rows]), axis=0)[-1]
        self._num_tokens += rows.shape[0]

    def arrays(self) -> list[mx.array]:
        """What is to be evaluated after a forward."""
        return [] if self._kept is None else [self._kept]

    def pooled(self) -> mx.array:
        """Float32 `[size]`, unevaluated."""
        assert self._kept is not None, "a prompt has tokens"
        return self._kept / self._num_tokens if self._pooling == "mean" else self._kept


class Pooler:
    """Pools the rows of one engine. `embedding` is its longest vector, None where it gives none."""

    def __init__(self, sentence: Sentence, hidden_size: int) -> None:
        self.embedding = sentence.embedding(hidden_size)
        self._layers = sentence.layers

    @staticmethod
    def begin(row: Row) -> None:
        """Pool the hidden states of `row` from here on, if they are asked for."""
        if row.request.embedding is not None and row.pooled is None:
            row.pooled = Pooled(row.request.embedding.pooling)

    def end(self, row: Row, now_s: float) -> Embedded:
        """What `row` has come to. Raises StepFailed where that is no vector of numbers."""
        vector = self._vector(row.pooled.pooled(), row.request.embedding)
        if not mx.isfinite(vector).all().item():
            raise StepFailed("the hidden states of this input are not numbers")
        numbers: list[float] = vector.tolist()  # type: ignore[assignment]
        return Embedded(row, tuple(numbers), (now_s - row.started_s) * 1000)

    def _vector(self, pooled: mx.array, asked: Embedding | None) -> mx.array:
        assert asked is not None, "only what is asked for is pooled"
        for layer in self._layers:
            pooled = layer(pooled)
        vector = pooled[: asked.num_dimensions]
        if asked.normalizes:
            vector = vector / mx.maximum(mx.sqrt(mx.sum(vector * vector)), SMALLEST)
        return vector


def hidden_size(forward: Forward) -> int:
    """How long the hidden states in front of the output head are; 0 where the model's head is not found."""
    pooled = Pooled("last")
    storage = forward.open_dense()
    forward.launches.is_trying = True
    try:
        forward.run([Span(storage, [0], num_sampled=0, pooled=pooled)])
    except HeadNotFound:
        return 0
    finally:
        forward.launches.is_trying = False
    [kept] = pooled.arrays()
    mx.eval(kept, storage.arrays())
    return int(kept.size)
