"""A talk with a model from its start to the exit code: which server, one answer or a chat, and Ctrl-C."""

import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.errors import UserError
from mlxcel_cli import answer, chats, config, render, repl
from mlxcel_cli.chats import Kept
from mlxcel_cli.client import Client
from mlxcel_cli.conversation import Conversation
from mlxcel_cli.errors import EngineGone
from mlxcel_cli.interrupt import interrupt_calls, interrupt_ignored, leaves_cleanly
from mlxcel_cli.lines import Lines, Piped
from mlxcel_cli.repl import Repl
from mlxcel_cli.transport import InProcess
from mlxcel_cli.view import View
from server.config import ServerConfig

OK, FAILED, INTERRUPTED = 0, 1, 130
GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class Talk:
    """What was asked for: `where` is a server to start in this process, or the address of one.

    `model` is the name to send, or None; `asked` are fields of the request, only those that were given, and
    `bounded_by` is what gave `max_tokens`, if any. `key` is shown to a server elsewhere. `reasoning` is what
    becomes of it, None: folded in a chat and hidden elsewhere. `kept` is the chat that is gone on with, if any;
    `keeps` whether a chat at a terminal is kept unasked.
    """

    where: ServerConfig | str
    model: str | None
    asked: Mapping[str, Any]
    system: str | None = None
    stats: bool = False
    reasoning: str | None = None
    bounded_by: str = "--max-tokens"
    kept: Kept | None = None
    keeps: bool = True
    key: str = field(default="", repr=False)

    @property
    def max_tokens(self) -> int | None:
        return self.asked.get("max_tokens")


def answer_once(talk: Talk, prompt: str) -> int:
    """Answer one prompt; the exit code."""
    return _once(_answer(talk, prompt, raw=False))


def continue_text(talk: Talk, text: str) -> int:
    """Continue one text as it is; the exit code."""
    return _once(_answer(talk, text, raw=True))


def converse(talk: Talk) -> int:
    """Chat until the person leaves or stdin ends; the exit code."""
    return _outcome(_converse(talk))


def _once(talk: Coroutine[Any, Any, bool]) -> int:
    code = _outcome(talk)
    if code == INTERRUPTED:
        render.note("(stopped)")
    return code


def _outcome(talk: Coroutine[Any, Any, bool]) -> int:
    try:
        return OK if asyncio.run(talk) else FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


@asynccontextmanager
async def _client(talk: Talk) -> AsyncIterator[Client]:
    """A client of the server that is meant; one in this process lives as long as the client."""
    if isinstance(talk.where, str):
        async with Client.to(talk.where, model=talk.model, key=talk.key) as client:
            yield client
        return

    from server.app import make_app

    client = await Client(InProcess(make_app(talk.where)), "http://localhost").__aenter__()
    try:
        yield client
    except asyncio.CancelledError:
        await _close(client, INTERRUPTED)
        raise
    except BaseException:
        await client.__aexit__()
        raise
    else:
        await _close(client, OK)


async def _close(client: Client, code: int) -> None:
    """Shut the server in this process down; when it takes longer than a person waits, end the process with `code`.

    A model that is being loaded, or a step that runs, cannot be interrupted.
    """
    closing = asyncio.ensure_future(client.__aexit__())
    try:
        await asyncio.wait({closing}, timeout=GRACE_S)
    finally:
        if not closing.done():
            sys.stdout.flush()
            os._exit(code)
    closing.result()


async def _answer(talk: Talk, text: str, *, raw: bool) -> bool:
    this = asyncio.current_task()
    assert this is not None, "coroutines run in tasks"
    with interrupt_calls(this.cancel):
        async with _client(talk) as client:
            conversation = _conversation(talk, client)
            shown = await answer.show(
                client.complete(text, talk.asked) if raw else conversation.ask(text),
                View(talk.reasoning or "hide"),
            )
            answer.remark(shown, talk.max_tokens, by=talk.bounded_by, with_stats=talk.stats)
            if talk.kept is not None:
                talk.kept.write(conversation.messages)
    if "response_format" in talk.asked and shown.end.finish_reason == "length":
        raise UserError(
            "the answer was cut before its JSON was whole", hint="more tokens: -n, or a longer context"
        )
    return True


async def _converse(talk: Talk) -> bool:
    async with _client(talk) as client:
        # Also where nothing will be asked: a server that does not answer is an error.
        names = [talk.where.model_id] if isinstance(talk.where, ServerConfig) else await client.models()
        if sys.stdin is None:
            return True
        if not render.is_terminal(sys.stdin):
            return await _repl(talk, client, Piped(sys.stdin.fileno()), View(talk.reasoning or "hide")).run()
        render.put("")  # a chat whose answers have nowhere to go is an error at once
        name = render.harmless(" ".join(", ".join(names).split()))
        render.note(f"{name}: /help lists the commands, Ctrl-D leaves")
        shown = View(talk.reasoning or "fold", markdown=True)
        with leaves_cleanly(), interrupt_ignored():
            await _repl(talk, client, _typed(), shown, name=name).run()
        return True


def _typed() -> Lines:
    """Messages from the terminal on stdin."""
    if config.is_dumb():
        return Piped(sys.stdin.fileno(), render.prompt)

    from mlxcel_cli.keyboard import Keyboard, kept_history

    return Keyboard(kept_history(config.user_data_dir() / "history", warn=render.note))


def _repl(talk: Talk, client: Client, lines: Lines, shown: View, *, name: str = "") -> Repl:
    # A server in this process whose engine is gone will not come back; one elsewhere may.
    fatal = (EngineGone,) if isinstance(talk.where, ServerConfig) else ()
    kept = talk.kept
    if kept is None and talk.keeps and render.is_terminal(sys.stdin):
        kept = chats.kept(config.sessions_dir(), None)
    view = dataclasses.replace(shown, stats=talk.stats)
    told = {"name": name, "bounded_by": talk.bounded_by}
    return Repl(_conversation(talk, client), lines, shown=view, kept=kept, fatal=fatal, **told)


def _conversation(talk: Talk, client: Client) -> Conversation:
    """A conversation that goes on where a kept one ended; a system prompt that was given wins over its own."""
    conversation = Conversation(client, system=talk.system, asked=talk.asked, warn=render.note)
    if talk.kept is not None and talk.kept.messages:
        conversation.resume(talk.kept.messages)
        assert talk.kept.written_s is not None, "what has messages was read"
        when = render.age(time.time() - talk.kept.written_s)
        render.note(f"(session {talk.kept.name} of {when}: {repl.restored(talk.kept.messages)})")
        conversation.system = talk.system or conversation.system
    elif talk.kept is not None:
        render.note(f"(session {talk.kept.name}: new)")
    return conversation
