"""`POST /v1/embeddings`, in OpenAI's shape: a vector for each input."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.request import Request as Prompt
from engine.served import ServedModel
from server.embeddings import EmbeddingsBody, Input, written
from server.generate import check_ids, encode
from server.routes.common import deliver, priority_of, read_body, request_id_of, served_of
from server.vectors import Vectors


async def embeddings(request: Request) -> Response | ASGIApp:
    body = await read_body(request, EmbeddingsBody)
    inputs = body.inputs()
    served = served_of(request, body.model)
    priority = priority_of(request)
    request_id = request_id_of(request, "embd")

    async def begin() -> Vectors:
        model = await served.bridge.model()
        embedding = body.embedding(model.embedding)
        prompts = await served.bridge.text_work(lambda: _prompts(model, body, inputs))
        vectors = Vectors(
            served.bridge,
            [
                Prompt(
                    request_id,
                    prompt,
                    choice=place,
                    priority=priority,
                    embedding=embedding,
                    adapter=served.adapter,
                )
                for place, prompt in enumerate(prompts)
            ],
            model.num_slots,
        )
        vectors.begin()
        return vectors

    async def whole(vectors: Vectors) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": written(vector, body.encoding_format)}
            for index, vector in enumerate(await vectors.whole())
        ]
        num_tokens = vectors.usage.prompt_tokens
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": served.name, "usage": usage}

    return await deliver(request, served, request_id, begin, frames=None, whole=whole, user=body.user or "")


def _prompts(model: ServedModel, body: EmbeddingsBody, inputs: list[Input]) -> list[tuple[int, ...]]:
    """Token ids of each input, as the tokenizer begins and ends a text. Raises RequestError."""
    prompts = []
    for place, one in enumerate(inputs):
        param = body.param(place)
        ids = encode(model, one, add_special=True, param=param, num_new=0) if isinstance(one, str) else one
        check_ids(model, ids, param, num_new=0)
        prompts.append(tuple(ids))
    return prompts
