"""What TAB offers in the chat."""

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from mlxcel_cli.completer import SlashCompleter
from mlxcel_cli.slash import COMMANDS


def offered(text: str) -> list[str]:
    """What the text may become, each as the whole message."""
    completions = SlashCompleter().get_completions(Document(text), CompleteEvent(completion_requested=True))
    return [text[: len(text) + completion.start_position] + completion.text for completion in completions]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("/", [word for command in COMMANDS for word in command.words]),
        ("/s", ["/system", "/save", "/set", "/stats"]),
        ("/stats o", ["/stats on", "/stats off"]),
        ("/set r", ["/set repeat_penalty", "/set reasoning"]),
        ("/set reasoning ", ["/set reasoning show", "/set reasoning fold", "/set reasoning hide"]),
        ("/set temp d", ["/set temp default"]),
        ("/set temp 1 ", []),
        ("/clear ", []),
        ("/nonsense", []),
        ("", []),
        ("a /s", []),
        ("/s\nx", []),
    ],
)
def test_commands_and_what_follows_them(text, whole):
    assert offered(text) == whole


def test_every_command_is_told_with_a_word_of_help():
    completions = SlashCompleter().get_completions(Document("/"), CompleteEvent())
    assert all(completion.display_meta_text for completion in completions)


@pytest.mark.parametrize("command", ["/file", "/load", "/save"])
def test_names_of_files(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a b.txt", "ab.py", "c"):
        (tmp_path / name).write_text("")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "inner").write_text("")
    assert offered(f"{command} a") == [f"{command} a b.txt", f"{command} ab.py"]
    assert offered(f"{command} dir/") == [f"{command} dir/inner"]
    assert offered(f"{command} ~/a b") == [f"{command} ~/a b.txt"]
    assert offered(f"{command} no") == []
