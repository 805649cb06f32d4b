"""What a person sees of a chat in a real terminal: tmux draws it, and a server double answers."""

import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.cli.double import Double
from tests.cli.pane import Pane, program

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

ENTER, CTRL_C, CTRL_R, UP = "Enter", "C-c", "C-r", "Up"
GREETING = "double: /help lists the commands, Ctrl-D leaves"
MARKDOWN = "# Title\n\nIt is **very** good:\n\n```python\ndef f():\n\treturn 1\n```\n\n- one\n- two\n"


@pytest.fixture
def pane() -> Iterator[Callable[..., Pane]]:
    opened: list[Pane] = []

    def start(command: str, environment: dict[str, str] | None = None, **size: int) -> Pane:
        kept = {name: os.environ[name] for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "MLXCEL_HOME")}
        opened.append(Pane(command, {"NO_COLOR": "", **kept, **(environment or {})}, **size))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def spoken(double: Double) -> list[str]:
    return [body["messages"][-1]["content"] for _, body in double.asked]


def test_a_paste_of_50_kb_is_one_message_and_takes_little_of_the_screen(double, address, pane):
    lines = [f"line {number} of a long paste, so that it has many letters" for number in range(1000)]
    text = "\n".join(lines)
    assert len(text) > 50_000
    chat = pane(program("chat", "--server", address))
    chat.wait_for(">>>")
    chat.paste(text)
    chat.wait_for(lines[-1])
    chat.type(ENTER)
    chat.wait_for("Hello")
    chat.wait_for("context 6 of 100")
    assert spoken(double) == [text]
    begun = [f">>> {lines[0]}", *(f"... {line}" for line in lines[1:3]), "... (1000 lines, 53.9 kB in all)"]
    assert chat.screen.splitlines()[:7] == [*begun, "Hello", "", ">>>"]


def test_ctrl_c_in_mid_answer_leaves_a_clean_screen_and_drops_the_turn(double, address, pane):
    double.hold = True
    chat = pane(program("chat", "--server", address))
    chat.wait_for(">>>")
    chat.type("one", ENTER)
    chat.wait_for("Hello")
    chat.type("ahead", CTRL_C)
    chat.wait_for("stopped")
    double.hold = False
    chat.wait_for(">>> ahead")
    chat.type(" two", ENTER)
    chat.wait_for(">>>", 3)
    stopped = ["(stopped; the turn is dropped, /retry asks again)"]
    expected = [GREETING, ">>> one", "Hello", "", *stopped, ">>> ahead two", "Hello", "", ">>>"]
    assert chat.text.splitlines()[: len(expected)] == expected
    assert [len(body["messages"]) for _, body in double.asked] == [1, 1]


@pytest.mark.parametrize(("columns", "lines"), [(50, 20), (100, 20), (30, 8)])
def test_a_resize_in_mid_answer_repeats_and_loses_nothing(columns, lines, double, address, pane):
    more = threading.Event()
    words = [f"word{number} " for number in range(120)]
    double.answer = lambda body: [*words[:10], "\n\n", *words[10:70], more, *words[70:]]
    chat = pane(program("chat", "--server", address), columns=70)
    chat.wait_for(">>>")
    chat.type("one", ENTER)
    chat.wait_for("word69")
    chat.resize(columns, lines)
    more.set()
    chat.wait_for("word119")
    chat.wait_for(">>>", 2)
    assert [word for word in chat.text.split() if word.startswith("word")] == [word.strip() for word in words]


def test_what_is_typed_during_an_answer_waits_for_the_next_prompt(double, address, pane):
    more = threading.Event()
    double.answer = lambda body: ["Hel", more, "lo"]
    chat = pane(program("chat", "--server", address))
    chat.wait_for(">>>")
    chat.type("one", ENTER)
    chat.wait_for("Hel")
    chat.type("ahead")
    more.set()
    chat.wait_for(">>> ahead")
    assert chat.text.splitlines()[:5] == [GREETING, ">>> one", "Hello", "", ">>> ahead"]


def test_a_narrow_terminal_breaks_no_word_and_shortens_the_status(double, address, pane):
    chat = pane(program("chat", "--server", address), columns=40)
    chat.wait_for(">>>")
    chat.type("/stats on", ENTER)
    chat.wait_for(">>>", 2)
    chat.type("one", ENTER)
    chat.wait_for(">>>", 3)
    chat.wait_for("double | 2 tokens, 20.0 tokens/s | co...")
    broken = ["prompt: 4 tokens, 40.0 tokens/s | new: 2", "tokens, 20.0 tokens/s | first token", "after 0."]
    assert "\n".join(broken) in chat.text
    chat.resize(60, 20)
    chat.wait_for("double | 2 tokens, 20.0 tokens/s | context 6 of 100 (6%)")


def test_history_is_there_after_a_restart_and_so_is_the_chat(double, address, pane):
    first = pane(program("chat", "--server", address))
    first.wait_for(">>>")
    for number, message in enumerate(("first one", "second two"), 2):
        first.type(message, ENTER)
        first.wait_for(">>>", number)
    first.type("/bye", ENTER)
    second = pane(program("chat", "--server", address, "--continue"))
    second.wait_for('2 turns, the last "second two")')
    second.wait_for(">>>")
    second.type("fi", UP)
    second.wait_for(">>> first one")
    second.type(ENTER)
    second.wait_for(">>>", 2)
    second.type(CTRL_R)
    second.wait_for("reverse-i-search")
    second.type("sec")
    second.wait_for("second two", 2)
    second.type(ENTER)
    second.type(ENTER)
    second.wait_for("Hello", 2)
    assert spoken(double) == ["first one", "second two", "first one", "second two"]
    assert [len(body["messages"]) for _, body in double.asked] == [1, 3, 5, 7]


def test_markdown_is_rendered_and_code_can_be_copied(double, address, pane):
    double.answer = lambda body: list(MARKDOWN)
    chat = pane(program("chat", "--server", address))
    chat.wait_for(">>>")
    chat.type("one", ENTER)
    chat.wait_for(">>>", 2)
    _, _, *shown = chat.text.splitlines()
    code = ["```python", "def f():", "        return 1", "```"]
    rendered = ["Title", "", "It is very good:", "", *code, "", " • one", " • two"]
    assert shown[: len(rendered)] == rendered
    assert "\x1b[1mvery\x1b[0m" in chat.screen
    double.thinks = ["I plan."]
    chat.type("two", ENTER)
    chat.wait_for("(thought for")
    chat.wait_for(">>>", 3)
    chat.type("/")
    chat.wait_for("leave (also Ctrl-D)")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_without_colours_the_answer_stands_as_it_was_written(environment, double, address, pane):
    double.answer = lambda body: list(MARKDOWN)
    double.thinks = ["I plan."]
    chat = pane(program("chat", "--server", address), environment)
    chat.wait_for(">>>")
    chat.type("one", ENTER)
    chat.wait_for(">>>", 2)
    assert MARKDOWN.expandtabs(8) in chat.text
    assert "\x1b" not in chat.screen
    if environment == {"TERM": "dumb"}:
        assert b"\x1b" not in chat.raw


def test_a_pipe_has_text_alone(double, address, pane):
    double.answer = lambda body: list(MARKDOWN)
    script = f"printf 'one\\ntwo\\n' | {program('chat', '--server', address)} 2>&1 | cat -v; echo end"
    chat = pane(shlex.join(["sh", "-c", script]))
    chat.wait_for("end")
    assert chat.text.startswith((MARKDOWN * 2).expandtabs(8) + "end")
    assert spoken(double) == ["one", "two"]
