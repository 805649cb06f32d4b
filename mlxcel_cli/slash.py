"""The commands of the chat loop, in words: what `/help` lists and TAB offers. The loop does what they say."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """`words` are its names, the first being the usual one; `takes` what may follow; `help` what it does."""

    words: tuple[str, ...]
    takes: str
    help: str


COMMANDS = (
    Command(("/help", "/?"), "", "this list"),
    Command(("/bye", "/exit"), "", "leave (also Ctrl-D)"),
    Command(("/clear",), "", "forget the conversation and begin another; the system prompt stays"),
    Command(("/system",), "[TEXT]", "set the system prompt, or show it"),
    Command(("/file",), "[PATH]", "put a file's text into the next message; alone: list them, `-`: none"),
    Command(("/retry",), "", "ask the last question again, also one that was stopped, failed or undone"),
    Command(("/undo",), "", "drop the last turn; again: the one before"),
    Command(("/save",), "[FILE]", "write the conversation to a new file, or again to its own"),
    Command(("/load",), "FILE", "go on from a saved conversation in place of this one"),
    Command(
        ("/set",), "[KEY VALUE]", 'change how later answers are drawn and shown ("default": as before), or show it'
    ),
    Command(("/tokens",), "", "how much of the context the conversation takes"),
    Command(("/stats",), "[on|off]", "the last answer's numbers; on: after every answer"),
    Command(("/reasoning",), "", "what the model thought before its last answer"),
)
KEYS = (
    ('"""', "begin a message of several lines, and end it"),
    ("Ctrl-C", "stop the answer and drop its turn; at the prompt: clear the line"),
)
EDITING_KEYS = (
    ("Alt-Enter", "a new line in the message (also Esc, then Enter)"),
    ("Ctrl-R, Up", "search the history; Up: for what begins like this line"),
    ("TAB", "complete a command, a setting or the name of a file"),
)


def help_text(*, edits: bool) -> str:
    """Every command and key, one a line. `edits`: lines can be edited, so that there are keys for it."""
    entries = [(f"{', '.join(c.words)} {c.takes}".rstrip(), c.help) for c in COMMANDS]
    entries += [*KEYS, *(EDITING_KEYS if edits else ())]
    width = max(len(name) for name, _ in entries)
    return "\n".join(f"{name:{width}}  {said}" for name, said in entries)
