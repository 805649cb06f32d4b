"""The chat loop: messages in, answers out, until there are no more.

Ctrl-C during an answer stops the answer and drops that turn; a turn that fails is rolled back; the loop goes on.
It knows neither keyboards (see lines) nor servers (see conversation).
"""

import asyncio
import difflib
import re
from collections.abc import Awaitable, Callable

from engine.errors import MlxcelError
from mlxcel_cli import answer, render
from mlxcel_cli.conversation import Conversation
from mlxcel_cli.interrupt import interrupt_calls
from mlxcel_cli.lines import Lines

COMMAND = re.compile(r"/[a-z?]*(?=\s|$)")
STOPPED = "(stopped; the turn is dropped, /retry asks again)"
HELP = '''\
/help, /?        this list
/bye, /exit      leave (also Ctrl-D)
/clear           forget the conversation; the system prompt stays
/system [TEXT]   set the system prompt, or show it
/retry           drop the last answer and ask again
"""              begin a message of several lines, and end it
Ctrl-C           stop the answer and drop its turn; at the prompt: clear the line'''


class Leave(Exception):
    """The person wants to go."""


class Repl:
    """One chat. `max_tokens` is the bound that was asked for, `stats` whether each answer's numbers are shown.

    Errors of the types in `fatal` are raised instead of being told.
    """

    def __init__(
        self,
        conversation: Conversation,
        lines: Lines,
        *,
        max_tokens: int | None = None,
        stats: bool = False,
        fatal: tuple[type[MlxcelError], ...] = (),
    ) -> None:
        self._conversation = conversation
        self._lines = lines
        self._max_tokens = max_tokens
        self._stats = stats
        self._fatal = fatal
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/help": self._help,
            "/?": self._help,
            "/bye": self._leave,
            "/exit": self._leave,
            "/clear": self._clear,
            "/system": self._system,
            "/retry": self._retry,
        }

    async def run(self) -> bool:
        """Serve messages until there are no more; whether every turn went well."""
        went_well = True
        while (message := await self._lines.read()) is not None:
            try:
                await self._take(message)
            except Leave:
                break
            except self._fatal:
                raise
            except MlxcelError as problem:
                went_well = False
                render.failure(problem)
        return went_well

    async def _take(self, message: str) -> None:
        if command := COMMAND.match(message):
            word = command.group()
            await self._commands.get(word, self._unknown)(message)
        elif message.strip():
            await self._turn(message)

    async def _turn(self, text: str) -> None:
        turn = asyncio.ensure_future(answer.show(self._conversation.ask(text)))
        try:
            with interrupt_calls(turn.cancel):
                shown = await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                raise
            render.note(STOPPED)
            return
        answer.remark(shown, self._max_tokens, with_stats=self._stats)

    async def _help(self, _: str) -> None:
        render.say(HELP)

    async def _leave(self, _: str) -> None:
        raise Leave

    async def _clear(self, _: str) -> None:
        self._conversation.clear()
        render.note("(the conversation is forgotten)")

    async def _system(self, message: str) -> None:
        if text := message.removeprefix("/system").strip():
            self._conversation.system = text
            render.note("(the system prompt is set; /clear begins anew with it)")
        else:
            render.note(f"system prompt: {self._conversation.system or '(none)'}")

    async def _retry(self, _: str) -> None:
        if text := self._conversation.take_back():
            await self._turn(text)
        else:
            render.note("(nothing was asked yet)")

    async def _unknown(self, message: str) -> None:
        word = message.split()[0]
        near = difflib.get_close_matches(word, self._commands, n=1)
        render.error(f"unknown command {word}", f"did you mean {near[0]}?" if near else "/help lists the commands")
