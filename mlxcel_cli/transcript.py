"""A conversation as a file: a JSON object whose `messages` are those of a chat request.

Only its owner may read it. It knows files and shapes, and nothing of who talks.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.errors import UserError
from mlxcel_cli import files, unicode
from mlxcel_cli.draft import draft_of

Message = dict[str, str]
MOST_BYTES = 64_000_000


def write(path: Path, messages: Sequence[Message], *, replaces: bool) -> None:
    """Write `messages` to `path`, all or nothing. Only with `replaces` may a file be there already.

    Raises UserError where it cannot be written.
    """
    is_new = False
    try:
        content = json.dumps({"messages": list(messages)}, ensure_ascii=False, indent=1).encode() + b"\n"
        if not replaces:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            is_new = True
        with draft_of(path) as file:
            file.write(content)
    except FileExistsError:
        if not path.exists():
            raise UserError(f"{path} cannot be written: it is a link to a file that is not there") from None
        raise UserError(f"{path} exists already", hint="choose another name; nothing is overwritten") from None
    except (OSError, ValueError) as error:
        if is_new:
            with suppress(OSError):
                os.unlink(path)
        raise UserError(f"{path} cannot be written: {error}") from None


def read(path: Path) -> list[Message]:
    """The messages in the file at `path`: at most one of the system's, then questions and answers in turn.

    Raises UserError where the file cannot be read or holds no such thing.
    """
    try:
        files.demand_end(path, path, most_bytes=MOST_BYTES)
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{path} cannot be read: {reason}") from None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} holds no conversation: it is not JSON ({error})") from None
    messages = said.get("messages") if isinstance(said, dict) else None
    if not isinstance(messages, list):
        raise UserError(f'{path} holds no conversation: it is no object with "messages"')
    roles = ["user", "assistant"] * (len(messages) // 2 + 1)
    if messages and _role(messages[0]) == "system":
        roles.insert(0, "system")
    for number, (message, role) in enumerate(zip(messages, roles, strict=False), 1):
        if _role(message) != role:
            raise UserError(f"{path} holds no conversation: message {number} should be a text of the {role}'s")
        unicode.demand(message["content"], f"{path} holds no conversation: message {number}")
    if messages and messages[-1]["role"] == "user":
        raise UserError(f"{path} holds no conversation: its last question has no answer")
    return messages


def _role(message: Any) -> str | None:
    """Whose text `message` is; None for anything that is not a role and a text alone."""
    is_text = isinstance(message, dict) and message.keys() == {"role", "content"}
    return str(message["role"]) if is_text and isinstance(message["content"], str) else None
