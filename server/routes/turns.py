"""The assistant's next turn, whichever dialect asks for it: from the one chat request to an answer under way."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import RequestError
from engine.request import Priority
from engine.served import ServedModel
from server.chat import ChatBody
from server.conversations import Turn
from server.generate import Answer, Prompted, chat_prompt, forced_calls, name_schema
from server.models import Served
from server.routes.common import Dialect, begun


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Has errors call a chat request's fields what the client's dialect calls them, or what they are part of."""
    try:
        yield
    except RequestError as error:
        if own := names.get(error.param) or names.get(error.param.partition("[")[0]):
            error.args = (str(error).replace(error.param, own, 1),)
            error.param = own
        raise


async def prompted_turn(served: Served, body: ChatBody) -> tuple[ServedModel, Turn, Prompted]:
    """The conversation as the model will read it, when the model is there. Raises RequestError."""
    model = await served.bridge.model()
    turn = Turn(
        body.messages,
        body.callable,
        body.template_arguments(model.template, model.markup),
        body.cache_salt,
        body.prompt_cache_key,
        body.continue_final_message,
    )
    messages = served.conversations.filled(model, turn) if body.cache_prompt else body.messages
    prompted = await chat_prompt(
        served.bridge, model, messages, tools=turn.tools, arguments=turn.arguments, continues=turn.continues
    )
    return model, turn, prompted


async def next_turn(served: Served, dialect: Dialect, body: ChatBody, priority: Priority) -> Answer:
    """Enqueue the answer to a conversation, and take note of it when it ends. Raises as `start` does."""
    model, turn, prompted = await prompted_turn(served, body)
    forcing: dict[str, Any] = {}
    if required := body.forced_tools:
        prompted, forcing = forced_calls(prompted, required, parallel=body.calls_in_parallel)
    try:
        answer = await begun(
            served,
            model,
            dialect,
            body,
            prompted,
            priority,
            thinking_tokens=body.thinking_tokens,
            tools=body.allowed,
            parallel_calls=body.parallel_tool_calls,
            **forcing,
        )
    except RequestError as error:
        if required and error.param == "tool_choice":
            await served.bridge.text_work(lambda: name_schema(model, body.tools, required))
        raise
    if body.cache_prompt:
        answer.on_finish = lambda choice: served.conversations.answered(model, turn, choice, num_choices=body.n)
    return answer
