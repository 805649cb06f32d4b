"""The body of OpenAI's embeddings, and how a vector is written down."""

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.errors import NoEmbeddings, RequestError
from engine.request import Embedding, Pooling
from server.bodies import Count
from server.validate import MAX_ECHOED

MAX_INPUTS = 2048  # as in OpenAI's API

Encoding = Literal["float", "base64"]
Input = str | list[int]


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`. An input is a text or a list of token ids; several are a list of either. What is not
    asked for of `pooling` is as the checkpoint says.
    """

    input: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    model: str = ""
    encoding_format: Encoding = "float"
    dimensions: Count | None = None
    pooling: Pooling | None = None
    normalize: bool = True
    user: str | None = None

    def inputs(self) -> list[Input]:
        """One entry for each vector. Raises RequestError for a mixture, an empty one, or too many."""
        if isinstance(self.input, str):
            inputs: list[Input] = [self.input]
        elif len({type(item) for item in self.input}) > 1:
            raise RequestError(
                "input: a list holds texts, token ids or lists of ids, not a mixture", param="input"
            )
        elif isinstance(self.input[0], int):
            inputs = [[item for item in self.input if isinstance(item, int)]]
        else:
            inputs = [item for item in self.input if not isinstance(item, int)]
        if len(inputs) > MAX_INPUTS:
            raise RequestError(f"input: {len(inputs)} inputs; at most {MAX_INPUTS} are taken", param="input")
        for place, one in enumerate(inputs):
            if not one:
                param = self.param(place)
                raise RequestError(f"{param}: there is nothing to embed", param=param)
        return inputs

    def param(self, place: int) -> str:
        """What errors call the input at `place`."""
        several = not isinstance(self.input, str) and not isinstance(self.input[0], int)
        return f"input[{place}]" if several else "input"

    def embedding(self, whole: Embedding | None) -> Embedding:
        """What is asked for of a model whose vectors are `whole`. Raises RequestError."""
        if whole is None:
            raise NoEmbeddings("this model gives no embeddings", param="model")
        size = whole.num_dimensions
        if self.dimensions is not None and self.dimensions > size:
            raise RequestError(
                f"dimensions: {str(self.dimensions)[:MAX_ECHOED]} are more than the {size} of this model",
                param="dimensions",
            )
        if self.pooling == "cls" and whole.pooling != "cls":
            raise RequestError(
                f"pooling: cls is for models that were made for it; this one pools by {whole.pooling}",
                param="pooling",
            )
        return Embedding(self.dimensions or size, self.pooling or whole.pooling, self.normalize)


def written(vector: Sequence[float], encoding: Encoding) -> list[float] | str:
    """`vector` as it is sent: a list, or its little-endian float32 in base64."""
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
