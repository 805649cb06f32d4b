"""What TAB offers in the chat: commands with a word of help each, what may follow them, and names of files."""

from collections.abc import Iterable

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from mlxcel_cli import asked, view
from mlxcel_cli.slash import COMMANDS

NAME_FILES = ("/file", "/load", "/save")


class SlashCompleter(Completer):
    """Completes the command that a message is, up to the cursor."""

    def __init__(self) -> None:
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        command, gap, rest = text.partition(" ")
        if "\n" in text or not text.startswith("/"):
            return
        if not gap:
            yield from _beginning(command, {word: c.help for c in COMMANDS for word in c.words})
        elif command in NAME_FILES:
            yield from self._files.get_completions(Document(rest.lstrip()), complete_event)
        else:
            *before, word = rest.split(" ")
            yield from _beginning(word, _following(command, before))


def _following(command: str, before: list[str]) -> dict[str, str]:
    """The words that may come next in a command, with what is said of each."""
    if command == "/stats" and not before:
        return dict.fromkeys(view.SWITCH, "")
    if command == "/set" and not before:
        return dict.fromkeys((*asked.NAMES, *view.VALUES), "")
    if command == "/set" and len(before) == 1:
        return dict.fromkeys(view.VALUES.get(before[0], (asked.DEFAULT,)), "")
    return {}


def _beginning(word: str, known: dict[str, str]) -> Iterable[Completion]:
    for name, said in known.items():
        if name.startswith(word):
            yield Completion(name, start_position=-len(word), display_meta=said)
