"""The chat loop: messages in, answers out, until there are no more.

Ctrl-C during an answer stops the answer and drops that turn; a turn that fails is rolled back; the loop goes on.
It knows neither keyboards (see lines) nor servers (see conversation).
"""

import asyncio
import difflib
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.errors import MlxcelError, UserError
from mlxcel_cli import answer, asked, files, render, transcript, view
from mlxcel_cli.answer import Answer
from mlxcel_cli.chats import Kept
from mlxcel_cli.conversation import Conversation
from mlxcel_cli.files import Quote
from mlxcel_cli.interrupt import interrupt_calls, unechoed
from mlxcel_cli.lines import Lines
from mlxcel_cli.slash import help_text
from mlxcel_cli.view import View

COMMAND = re.compile(r"/[a-z?]*(?=\s|$)")
SHOWN_CELLS = 60
STOPPED = "(stopped; the turn is dropped, /retry asks again)"


class Leave(Exception):
    """The person wants to go."""


class Repl:
    """One chat. `shown` says how answers are shown, `kept` is where it is kept, if anywhere, `name` the model's.

    `bounded_by` is what bounds answers from the start, where anything does.
    Errors of the types in `fatal` are raised instead of being told.
    """

    def __init__(
        self,
        conversation: Conversation,
        lines: Lines,
        *,
        shown: View = View(),
        kept: Kept | None = None,
        name: str = "",
        bounded_by: str = "--max-tokens",
        fatal: tuple[type[MlxcelError], ...] = (),
    ) -> None:
        self._conversation = conversation
        self._lines = lines
        self._view = shown
        self._kept = kept
        self._name = name
        self._bounded_by = bounded_by
        self._fatal = fatal
        self._answered: Answer | None = None
        self._stands = False  # whether the conversation ends with that answer
        self._context_length: int | None = None
        self._file: Path | None = None
        self._quotes: dict[str, Quote] = {}
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/help": self._help,
            "/?": self._help,
            "/bye": self._leave,
            "/exit": self._leave,
            "/clear": self._clear,
            "/system": self._system,
            "/file": self._quote,
            "/retry": self._retry,
            "/undo": self._undo,
            "/save": self._save,
            "/load": self._load,
            "/set": self._set,
            "/tokens": self._tokens,
            "/stats": self._show_stats,
            "/reasoning": self._show_reasoning,
        }

    async def run(self) -> bool:
        """Serve messages until there are no more; whether every turn went well."""
        went_well = True
        while True:
            try:
                if (message := await self._lines.read(self._status())) is None:
                    break
                await self._take(message)
                self._keep()
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
            quotes, self._quotes = self._quotes, {}
            await self._turn(files.before(message, quotes.values()))

    async def _turn(self, text: str) -> None:
        pieces = self._conversation.ask(text)
        turn = asyncio.ensure_future(answer.show(pieces, self._view))
        try:
            with interrupt_calls(turn.cancel), unechoed(sys.stdin):
                shown = await turn
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise  # it is the chat that ends
            render.note(STOPPED)
            self._stands = False
            return
        self._answered, self._stands = shown, True
        max_tokens = self._conversation.asked.get("max_tokens")
        answer.remark(shown, max_tokens, by=self._bounded_by, with_stats=self._view.stats)
        if self._context_length is None:
            self._context_length = await self._conversation.client.context_length() or 0

    def _status(self) -> str:
        """The model, and what the last answer took."""
        taken = answer.taken(self._answered, self._context_length) if self._answered and self._stands else ""
        attached = f"{render.count(len(self._quotes), 'file')} for the next message" if self._quotes else ""
        return " | ".join(part for part in (self._name, taken, attached) if part)

    def _keep(self) -> None:
        """Keep the chat as it is now; what cannot be kept is said once."""
        if self._kept is None:
            return
        try:
            self._kept.write(self._conversation.messages)
        except UserError as problem:
            if not self._kept.is_kept(self._conversation.messages):
                self._kept = None
                said = f"this chat is not kept any more: {problem}"
                problem = UserError(said, hint="/save FILE writes it elsewhere")
            render.failure(problem)

    async def _help(self, _: str) -> None:
        render.say(help_text(edits=self._lines.edits))

    async def _leave(self, _: str) -> None:
        raise Leave

    async def _clear(self, _: str) -> None:
        self._begin_anew()
        self._conversation.clear()
        self._quotes.clear()
        render.note("(the conversation is forgotten)")

    def _begin_anew(self) -> None:
        """What comes is another chat: what is kept of this one stays as it is."""
        self._file, self._answered = None, None
        if self._kept is not None:
            self._kept = self._kept.anew()

    async def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
            render.note("(the system prompt is set; /clear begins anew with it)")
        else:
            system = self._conversation.system or "(none)"
            render.note(f"system prompt: {system.translate(render.SHOWN_CONTROLS)}")

    async def _quote(self, name: str) -> None:
        if name == "-":
            self._quotes.clear()
            render.note("(no file goes with the next message)")
        elif name:
            self._quotes[name] = files.quote(name)
            render.note(f"({name} goes with the next message: {self._quotes[name].size})")
        else:
            listed = ", ".join(self._quotes) or "no file"
            render.note(f"({listed} with the next message)")

    async def _retry(self, _: str) -> None:
        if text := self._conversation.take_back():
            await self._turn(text)
        else:
            render.note("(nothing was asked yet)")

    async def _undo(self, _: str) -> None:
        self._stands = False
        if (text := self._conversation.undo()) is None:
            render.note("(there is no turn to drop)")
        else:
            render.note(f"(dropped: {beginning(text)})")

    async def _save(self, name: str) -> None:
        file = files.path_of(name) if name else self._file
        if file is None:
            raise UserError("/save needs a name the first time", hint="/save FILE")
        transcript.write(file, self._conversation.messages, replaces=file == self._file)
        self._file = file
        render.note(f"(saved to {file})")

    async def _load(self, name: str) -> None:
        if not name:
            raise UserError("/load needs the name of a file", hint="/load FILE")
        file = files.path_of(name)
        messages = transcript.read(file)
        self._begin_anew()
        self._conversation.resume(messages)
        self._file = file
        render.note(f"({restored(messages)} loaded from {file})")

    async def _set(self, said: str) -> None:
        name, *text = said.split(maxsplit=1) or [""]
        if not name:
            own = [f"{key:14}  {view.said(self._view, key)}" for key in view.VALUES]
            render.say("\n".join([*asked.lines(self._conversation.asked), *own]))
            return
        if name in view.VALUES:
            if text:
                self._view = view.changed(self._view, name, text[0])
            render.note(f"({name}: {view.said(self._view, name)})")
            return
        if text:
            self._conversation.asked = asked.changed(self._conversation.asked, name, text[0])
            if asked.wire_name(name) == "max_tokens":
                self._bounded_by = f"/set {name}"
        render.note(f"({name}: {asked.said(self._conversation.asked, name)})")

    async def _tokens(self, _: str) -> None:
        """Counted as the next prompt, but for what will be asked in it."""
        client = self._conversation.client
        question = {"role": "user", "content": files.before("", self._quotes.values())}
        number = await client.num_tokens([*self._conversation.messages, question])
        length = await client.context_length()
        said = f"the next prompt takes {answer.of_context(number, length)}, without what you will ask"
        if self._answered and self._stands and (taken := answer.context(self._answered, length)):
            said += f"; the last one and its answer, as in the status, {taken}"
        render.note(f"({said})")

    async def _show_stats(self, word: str) -> None:
        if word in view.SWITCH:
            self._view = view.changed(self._view, "stats", word)
            render.note(f"(numbers after every answer: {word})")
        elif word:
            raise UserError(f"/stats does not know {word}", hint="/stats, /stats on or /stats off")
        else:
            render.note(answer.stats(self._answered) if self._answered else "(nothing was answered yet)")

    async def _show_reasoning(self, _: str) -> None:
        thought = self._answered.thought.strip() if self._answered else ""
        render.note(thought.translate(render.SHOWN_CONTROLS) or "(there was no reasoning)")

    async def _unknown(self, word: str) -> None:
        near = difflib.get_close_matches(word, self._commands, n=1)
        render.error(f"unknown command {word}", f"did you mean {near[0]}?" if near else "/help lists the commands")


def restored(messages: list[dict[str, str]]) -> str:
    """What there is of a conversation: its turns, the last question, its system prompt."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    parts = [render.count((len(messages) - has_system) // 2, "turn")]
    if len(messages) > has_system:
        parts.append(f'the last "{beginning(messages[-2]["content"])}"')
    if has_system:
        parts.append(f'system prompt "{beginning(messages[0]["content"])}"')
    return ", ".join(parts)


def beginning(text: str) -> str:
    """The beginning of what was asked, in one line, and which files it was about."""
    names, prompt = files.parted(text)
    about = f"with {', '.join(names)}" if names else ""
    parts = [prompt, f"({about})" if prompt and about else about]
    return " ".join(_shortened(part) for part in parts if part)


def _shortened(text: str) -> str:
    return render.shortened(" ".join(text.split()).translate(render.SHOWN_CONTROLS), SHOWN_CELLS)
