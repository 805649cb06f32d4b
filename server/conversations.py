"""What outlives one turn of a conversation: its reasoning, and the beginning of the next prompt.

An answer's reasoning is put back where the conversation comes back without it (`echo.py`), and what the next
prompt will begin with, however the user goes on, is stored while the engine has nothing else to do.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.cache.prefix import num_same
from engine.errors import MlxcelError
from engine.request import Request
from engine.served import ServedModel
from engine.text.template import text_of
from engine.text.toolcalls import Tools
from server.bridge import Bridge
from server.echo import Echo
from server.generate import chat_prompt
from server.reply import Choice

PLACEHOLDERS = ("A", "b")  # two users' turns that have no beginning in common


@dataclass(frozen=True, slots=True)
class Turn:
    """What was rendered for one answer, and how its prompt is kept; `messages` as the client sent them. An answer
    that `continues` goes on from the last of them.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Tools = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str = ""
    prompt_cache_key: str = ""
    continues: bool = False

    def answered(self, text: str) -> list[Mapping[str, Any]]:
        """The messages and, as the last of them, what is answered by `text`."""
        if not self.continues:
            return [*self.messages, {"role": "assistant", "content": text}]
        *before, begun = self.messages
        return [*before, {**begun, "content": text_of(begun.get("content")) + text}]


class Conversations:
    """Serves the chat dialects of one model, with its `adapter` if it has one. `keeps`: there is a prompt cache
    that this is for.
    """

    def __init__(self, bridge: Bridge, name: str, *, keeps: bool, warms_up: bool, adapter: str = "") -> None:
        self._bridge = bridge
        self._name = name
        self._adapter = adapter
        self._keeps = keeps
        self._warms_up = keeps and warms_up
        self._echo = Echo()
        self.tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Let go of what is being prepared."""
        for task in self.tasks:
            task.cancel()

    def filled(self, model: ServedModel, turn: Turn) -> list[Mapping[str, Any]]:
        """The turn's messages, with the reasoning of those that were answered here and came back without."""
        return self._echo.filled(self._scope(model, turn), turn.messages)

    def answered(self, model: ServedModel, turn: Turn, choice: Choice, *, num_choices: int = 1) -> None:
        """Take note of a plain answer; one that calls tools goes on otherwise, and of several nobody knows which
        does.
        """
        if not self._keeps or choice.calls or not choice.text:
            return
        if turn.continues and choice.reasoning:
            return  # its thought begins in the text that it goes on from
        *before, whole = turn.answered(choice.text)
        thought = choice.reasoning
        if turn.continues:
            thought = self.filled(model, turn)[-1].get("reasoning_content") or ""
        if thought:
            self._echo.keep(self._scope(model, turn), before, whole["content"], thought)
        if self._warms_up and num_choices == 1:
            task = asyncio.ensure_future(self._warm_up(model, turn, choice.text))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _scope(self, model: ServedModel, turn: Turn) -> tuple[str, ...]:
        return self._name, model.template.source, turn.cache_salt

    async def _warm_up(self, model: ServedModel, turn: Turn, answer: str) -> None:
        with contextlib.suppress(MlxcelError):  # a conversation that cannot go on is no fault of this answer
            expected = await self._expected(model, turn, answer)
            if expected is not None:
                self._bridge.warm_up(expected)

    async def _expected(self, model: ServedModel, turn: Turn, answer: str) -> Request | None:
        """What the next prompt begins with, and one token more; None where that is nothing."""
        prompts = []
        for text in PLACEHOLDERS:
            messages = [*turn.answered(answer), {"role": "user", "content": text}]
            filled = self._echo.filled(self._scope(model, turn), messages)
            prompts.append(
                await chat_prompt(self._bridge, model, filled, tools=turn.tools, arguments=turn.arguments)
            )
        (one,), (other,) = (prompt.ids for prompt in prompts)
        common = num_same(one, other)
        boundaries = tuple(length for length in prompts[0].boundaries if length <= common)
        length = max(boundaries, default=0) if model.cuts_at_turns else common
        if not 0 < length < len(one):
            return None
        return Request(
            "next-turn",
            tuple(one[: length + 1]),
            cache_salt=turn.cache_salt,
            prompt_cache_key=turn.prompt_cache_key,
            boundaries=(*boundaries, length + 1),
            adapter=self._adapter,
        )
