"""What was said so far, and how the next turn is asked. It knows the client and no terminal.

A turn is kept only when its answer is whole: who stops reading early, or meets an error, has rolled it back.
A model without a chat template is given the plain transcript to complete.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from mlxcel_cli import unicode
from mlxcel_cli.client import Client
from mlxcel_cli.errors import NoTemplate
from mlxcel_cli.pieces import End, Piece, Text

NO_TEMPLATE = "this model has no chat template: it continues plain text instead of answering (-n bounds how far)"


class Conversation:
    """The turns of one conversation. `asked` are the next turns' request fields; `warn` takes one line of talk."""

    def __init__(
        self, client: Client, *, system: str | None, asked: Mapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self.client = client
        self.system = system
        self.asked = asked
        self.turns: list[dict[str, str]] = []
        self._last = ""
        self._last_is_kept = False
        self._warn = warn
        self._plain = False

    async def ask(self, text: str) -> AsyncGenerator[Piece, None]:
        """Stream the answer to `text`, and keep both once it is whole."""
        self._last, self._last_is_kept = text, False
        answer: list[str] = []
        question = {"role": "user", "content": text}
        async with aclosing(self._stream(question)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Text):
                    answer.append(piece.text)
                elif isinstance(piece, End):
                    self._last_is_kept = True
                    self.turns += [question, {"role": "assistant", "content": unicode.repaired("".join(answer))}]
                yield piece

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that was said, the system prompt first where there is one."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def resume(self, messages: list[dict[str, str]]) -> None:
        """Go on from `messages` in place of what was said: the system's first, if any, then whole turns."""
        self.clear()
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self.turns = messages[has_system:]
        if self.turns:
            self._last, self._last_is_kept = self.turns[-2]["content"], True

    def undo(self) -> str | None:
        """Forget the last turn that was kept and return what was asked in it; None where there is none."""
        if not self.turns:
            return None
        self._last, self._last_is_kept = self.turns[-2]["content"], False
        del self.turns[-2:]
        return self._last

    def take_back(self) -> str:
        """Forget the last turn and return what was asked in it; what was asked last when that failed already."""
        if self._last_is_kept:
            self.undo()
        return self._last

    def clear(self) -> None:
        """Forget every turn; the system prompt stays."""
        self.turns.clear()
        self._last, self._last_is_kept = "", False

    async def _stream(self, question: dict[str, str]) -> AsyncGenerator[Piece, None]:
        messages = [*self.messages, question]
        if not self._plain:
            try:
                async with aclosing(self.client.chat(messages, self.asked)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except NoTemplate:
                self._plain = True
                self._warn(NO_TEMPLATE)
        transcript = "\n\n".join(message["content"] for message in messages)
        async with aclosing(self.client.complete(transcript, self.asked)) as pieces:
            async for piece in pieces:
                yield piece
