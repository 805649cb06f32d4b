"""`POST /v1/responses`, in OpenAI's shapes, and `GET` and `DELETE /v1/responses/{id}` of those that are kept.

The whole answer is what the events of its stream have built.
"""

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.errors import MlxcelError
from server.continued import Responses
from server.errors import error_body, json_response
from server.generate import Answer, Usage
from server.items import NAMES, Item, ResponsesBody
from server.logprobs import Logprobs, listed, without_bytes
from server.reply import CallArguments, CallBegun, CallEnded, Finish, Prefilled, Reason, Reasoning, Text
from server.routes.common import (
    FramedDialect,
    priority_of,
    read_body,
    request_id_of,
    respond_framed,
    served_of,
    service_of,
)
from server.routes.turns import naming, next_turn
from server.sse import Comment, Named


class ResponseDialect(FramedDialect):
    """Writes one response down, item by item. `before` is the conversation that it goes on; it is `kept` when it
    has ended, unless the body says otherwise.
    """

    def __init__(
        self, request_id: str, served_name: str, body: ResponsesBody, before: Sequence[Item], kept: Responses
    ) -> None:
        super().__init__(request_id, served_name)
        self._conversation = [*before, *body.items()]
        self._kept = kept if body.store else None
        self._numbers = itertools.count()
        self._open = False  # whether the last item goes on
        self._logprobs: list[dict[str, Any]] = []  # of what comes next; told where that is text
        self._output: list[Item] = []
        self._response: dict[str, Any] = {
            "id": request_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": served_name,
            "output": [],
            "usage": None,
            **body.echoed(),
        }

    async def frames(self, answer: Answer) -> AsyncIterator[Any]:
        yield self._event("response.created", response=dict(self._response))
        yield self._event("response.in_progress", response=dict(self._response))
        try:
            async for piece in answer.pieces():
                match piece:
                    case Prefilled(done=done, total=total):
                        yield Comment(f"prefill {done}/{total}")
                    case Logprobs(tokens=tokens):
                        self._logprobs = listed(tokens, answer.spell)
                    case _:
                        for event in self._written(piece, answer.usage):
                            yield event
        except MlxcelError as error:
            for event in self._end("incomplete"):
                yield event
            yield self._failed(error)
            raise

    async def folded(self, answer: Answer) -> dict[str, Any]:
        """The response when it has ended."""
        async for _ in self.frames(answer):
            pass
        return self._response

    def _written(
        self, piece: Text | Reasoning | CallBegun | CallArguments | CallEnded | Finish, usage: Usage
    ) -> Iterator[Named]:
        match piece:
            case Text(text=text):
                yield from self._said("message", text)
            case Reasoning(text=text):
                yield from self._said("reasoning", text)
            case CallBegun(id=own, name=name):
                yield from self._begin({"type": "function_call", "call_id": own, "name": name, "arguments": ""})
            case CallArguments(text=text):
                self._output[-1]["arguments"] += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)
            case CallEnded(is_whole=is_whole):
                yield from self._end("completed" if is_whole else "incomplete")
            case Finish(reason=reason):
                if self._logprobs and self._is_open("message"):  # of tokens that became no character
                    yield from self._said("message", "")
                yield from self._end("incomplete" if reason == "length" else "completed")
                yield self._finished(reason, usage)

    def _said(self, kind: str, text: str) -> Iterator[Named]:
        """More of an item of text of that kind."""
        if not self._is_open(kind):
            yield from self._begin(
                {"type": "message", "role": "assistant", "content": []}
                if kind == "message"
                else {"type": "reasoning", "summary": [], "content": []}
            )
            part: dict[str, Any] = (
                {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                if kind == "message"
                else {"type": "reasoning_text", "text": ""}
            )
            self._output[-1]["content"].append(part)
            yield self._of_item("response.content_part.added", content_index=0, part=dict(part))
        part = self._output[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += self._logprobs
            more = {"logprobs": without_bytes(self._logprobs)}
            self._logprobs = []
        yield self._of_item(f"response.{part['type']}.delta", content_index=0, delta=text, **more)

    def _is_open(self, kind: str) -> bool:
        """Whether an item of that kind goes on."""
        return self._open and self._output[-1]["type"] == kind

    def _begin(self, item: Item) -> Iterator[Named]:
        yield from self._end("completed")
        self._open = True
        index = len(self._output)
        item = {"id": f"{item['type']}_{index}_{self.request_id}", **item, "status": "in_progress"}
        self._output.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield self._event("response.output_item.added", output_index=index, item=shown)

    def _end(self, status: str) -> Iterator[Named]:
        """The end of the item that goes on, if one does."""
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            more = {"logprobs": without_bytes(part["logprobs"])} if item["type"] == "message" else {}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _finished(self, reason: Reason, usage: Usage) -> Named:
        status = "incomplete" if reason == "length" else "completed"
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": self._output,
            "usage": _counted(usage),
        }
        if self._kept is not None:
            self._kept.keep(self._response, [*self._conversation, *self._output])
        return self._event(f"response.{status}", response=self._response)

    def _failed(self, error: MlxcelError) -> Named:
        told = error_body(error)["error"]
        self._response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": told["message"]},
            "output": self._output,
        }
        return self._event("response.failed", response=self._response)

    def _of_item(self, kind: str, **more: Any) -> Named:
        """An event about the last item."""
        return self._event(kind, output_index=len(self._output) - 1, item_id=self._output[-1]["id"], **more)

    def _event(self, kind: str, **more: Any) -> Named:
        return Named(type=kind, sequence_number=next(self._numbers), **more)


def _counted(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def responses(request: Request) -> Response | ASGIApp:
    service = service_of(request)
    body = await read_body(request, ResponsesBody)
    before: Sequence[Item] = ()
    if body.previous_response_id is not None:
        before = service.responses.conversation(body.previous_response_id, param="previous_response_id")
    with naming(NAMES):
        chat = body.chat(before)
    served = served_of(request, body.model)
    priority = priority_of(request)
    dialect = ResponseDialect(request_id_of(request, "resp"), served.name, body, before, service.responses)

    async def begin() -> Answer:
        with naming(NAMES):
            return await next_turn(served, dialect, chat, priority)

    return await respond_framed(request, served, dialect, begin, stream=body.stream, user=body.user)


async def kept_response(request: Request) -> Response:
    """`GET` shows it, `DELETE` forgets it."""
    own = request.path_params["id"]
    kept = service_of(request).responses
    headers = {"x-request-id": request_id_of(request, "req")}
    if request.method == "DELETE":
        kept.forget(own)
        return json_response({"id": own, "object": "response", "deleted": True}, headers=headers)
    return json_response(kept.response(own), headers=headers)
