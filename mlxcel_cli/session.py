"""A talk with a model from its start to the exit code: which server, one answer or a chat, and Ctrl-C."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mlxcel_cli import answer, config, render
from mlxcel_cli.client import Client
from mlxcel_cli.conversation import Conversation
from mlxcel_cli.errors import EngineGone
from mlxcel_cli.interrupt import interrupt_calls, interrupt_ignored
from mlxcel_cli.lines import Lines, Piped
from mlxcel_cli.repl import Repl
from mlxcel_cli.transport import InProcess
from server.config import ServerConfig

OK, FAILED, INTERRUPTED = 0, 1, 130
GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class Talk:
    """What was asked for: `where` is a server to start in this process, or the address of one.

    `model` is the name to send, or None; `asked` are fields of the request, only those that were given. `key` is
    shown to a server elsewhere.
    """

    where: ServerConfig | str
    model: str | None
    asked: Mapping[str, Any]
    system: str | None = None
    stats: bool = False
    show_reasoning: bool = False
    key: str = field(default="", repr=False)

    @property
    def max_tokens(self) -> int | None:
        return self.asked.get("max_tokens")


def answer_once(talk: Talk, prompt: str) -> int:
    """Answer one prompt; the exit code."""
    return _outcome(_answer(talk, prompt, raw=False))


def continue_text(talk: Talk, text: str) -> int:
    """Continue one text as it is; the exit code."""
    return _outcome(_answer(talk, text, raw=True))


def converse(talk: Talk) -> int:
    """Chat until the person leaves or stdin ends; the exit code."""
    return _outcome(_converse(talk))


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
            shown = await answer.show(
                client.complete(text, talk.asked) if raw else _conversation(talk, client).ask(text),
                show_reasoning=talk.show_reasoning,
            )
            answer.remark(shown, talk.max_tokens, with_stats=talk.stats)
    return True


async def _converse(talk: Talk) -> bool:
    async with _client(talk) as client:
        if sys.stdin is None:
            return True
        if not render.is_terminal(sys.stdin):
            return await _repl(talk, client, Piped(sys.stdin.fileno())).run()
        names = [talk.where.model_id] if isinstance(talk.where, ServerConfig) else await client.models()
        render.note(f"{', '.join(names)}: /help lists the commands, Ctrl-D leaves")
        with interrupt_ignored():
            await _repl(talk, client, _typed()).run()
        return True


def _typed() -> Lines:
    """Messages from the terminal on stdin."""
    if config.is_dumb():
        return Piped(sys.stdin.fileno(), render.prompt)

    from mlxcel_cli.keyboard import Keyboard, kept_history

    return Keyboard(kept_history(config.user_data_dir() / "history", warn=render.note))


def _repl(talk: Talk, client: Client, lines: Lines) -> Repl:
    # A server in this process whose engine is gone will not come back; one elsewhere may.
    fatal = (EngineGone,) if isinstance(talk.where, ServerConfig) else ()
    conversation = _conversation(talk, client)
    return Repl(conversation, lines, stats=talk.stats, show_reasoning=talk.show_reasoning, fatal=fatal)


def _conversation(talk: Talk, client: Client) -> Conversation:
    return Conversation(client, system=talk.system, asked=talk.asked, warn=render.note)
