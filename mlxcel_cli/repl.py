"""The chat loop: messages in, answers out, until there are no more.

Ctrl-C during an answer stops the answer and drops that turn; a turn that fails is rolled back; the loop goes on.
It knows neither keyboards (see lines) nor servers (see conversation).
"""

import asyncio
import difflib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.errors import MlxcelError, UserError
from mlxcel_cli import answer, asked, render, transcript
from mlxcel_cli.answer import Answer
from mlxcel_cli.conversation import Conversation
from mlxcel_cli.interrupt import interrupt_calls
from mlxcel_cli.lines import Lines

COMMAND = re.compile(r"/[a-z?]*(?=\s|$)")
SHOWN_LETTERS = 60
STOPPED = "(stopped; the turn is dropped, /retry asks again)"
HELP = '''\
/help, /?        this list
/bye, /exit      leave (also Ctrl-D)
/clear           forget the conversation; the system prompt stays
/system [TEXT]   set the system prompt, or show it
/retry           drop the last answer and ask again
/undo            drop the last turn; again: the one before
/save [FILE]     write the conversation to a new file, or again to the one it was saved to or loaded from
/load FILE       go on from a saved conversation in place of this one
/set [KEY VALUE] change how later answers are sampled ("default": as before), or show it
/stats [on|off]  the last answer's numbers; on: after every answer
"""              begin a message of several lines, and end it
Ctrl-C           stop the answer and drop its turn; at the prompt: clear the line'''


class Leave(Exception):
    """The person wants to go."""


class Repl:
    """One chat; `stats` says whether each answer's numbers are shown, `show_reasoning` whether what it thought is.

    Errors of the types in `fatal` are raised instead of being told.
    """

    def __init__(
        self,
        conversation: Conversation,
        lines: Lines,
        *,
        stats: bool = False,
        show_reasoning: bool = False,
        fatal: tuple[type[MlxcelError], ...] = (),
    ) -> None:
        self._conversation = conversation
        self._lines = lines
        self._stats = stats
        self._show_reasoning = show_reasoning
        self._fatal = fatal
        self._answered: Answer | None = None
        self._file: Path | None = None
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/help": self._help,
            "/?": self._help,
            "/bye": self._leave,
            "/exit": self._leave,
            "/clear": self._clear,
            "/system": self._system,
            "/retry": self._retry,
            "/undo": self._undo,
            "/save": self._save,
            "/load": self._load,
            "/set": self._set,
            "/stats": self._show_stats,
        }

    async def run(self) -> bool:
        """Serve messages until there are no more; whether every turn went well."""
        went_well = True
        while True:
            try:
                if (message := await self._lines.read()) is None:
                    break
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
            known = self._commands.get(word)
            await (self._unknown(word) if known is None else known(message.removeprefix(word).strip()))
        elif message.strip():
            await self._turn(message)

    async def _turn(self, text: str) -> None:
        pieces = self._conversation.ask(text)
        turn = asyncio.ensure_future(answer.show(pieces, show_reasoning=self._show_reasoning))
        try:
            with interrupt_calls(turn.cancel):
                shown = await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                raise
            render.note(STOPPED)
            return
        self._answered = shown
        answer.remark(shown, self._conversation.asked.get("max_tokens"), with_stats=self._stats)

    async def _help(self, _: str) -> None:
        render.say(HELP)

    async def _leave(self, _: str) -> None:
        raise Leave

    async def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._file = None
        render.note("(the conversation is forgotten)")

    async def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
            render.note("(the system prompt is set; /clear begins anew with it)")
        else:
            system = self._conversation.system or "(none)"
            render.note(f"system prompt: {system.translate(answer.SHOWN_CONTROLS)}")

    async def _retry(self, _: str) -> None:
        if text := self._conversation.take_back():
            await self._turn(text)
        else:
            render.note("(nothing was asked yet)")

    async def _undo(self, _: str) -> None:
        if (text := self._conversation.undo()) is None:
            render.note("(there is no turn to drop)")
        else:
            render.note(f"(dropped: {_beginning(text)})")

    async def _save(self, name: str) -> None:
        file = _path(name) if name else self._file
        if file is None:
            raise UserError("/save needs a name the first time", hint="/save FILE")
        transcript.write(file, self._conversation.messages, replaces=file == self._file)
        self._file = file
        render.note(f"(saved to {file})")

    async def _load(self, name: str) -> None:
        if not name:
            raise UserError("/load needs the name of a file", hint="/load FILE")
        file = _path(name)
        self._conversation.resume(transcript.read(file))
        self._file = file
        turns = len(self._conversation.turns) // 2
        render.note(f"({turns} turn{'' if turns == 1 else 's'} loaded from {file})")

    async def _set(self, said: str) -> None:
        name, *text = said.split(maxsplit=1) or [""]
        if not name:
            render.say("\n".join(asked.lines(self._conversation.asked)))
            return
        if text:
            self._conversation.asked = asked.changed(self._conversation.asked, name, text[0])
        render.note(f"({name}: {asked.said(self._conversation.asked, name)})")

    async def _show_stats(self, word: str) -> None:
        if word in ("on", "off"):
            self._stats = word == "on"
            render.note(f"(numbers after every answer: {word})")
        elif word:
            raise UserError(f"/stats does not know {word}", hint="/stats, /stats on or /stats off")
        else:
            render.note(answer.stats(self._answered) if self._answered else "(nothing was answered yet)")

    async def _unknown(self, word: str) -> None:
        near = difflib.get_close_matches(word, self._commands, n=1)
        render.error(f"unknown command {word}", f"did you mean {near[0]}?" if near else "/help lists the commands")


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError as error:  # the home of somebody unknown
        raise UserError(f"{name}: {error}") from None


def _beginning(text: str) -> str:
    line = " ".join(text.split()).translate(answer.SHOWN_CONTROLS)
    return line if len(line) <= SHOWN_LETTERS else line[: SHOWN_LETTERS - 3] + "..."
