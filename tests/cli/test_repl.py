"""The chat loop: commands, rolled-back turns, stopped answers."""

import asyncio
import os
import signal

import pytest

from mlxcel_cli.client import Client
from mlxcel_cli.conversation import NO_TEMPLATE, Conversation
from mlxcel_cli.errors import EngineGone
from mlxcel_cli.repl import HELP, STOPPED, Repl
from mlxcel_cli.transport import InProcess
from tests.cli.double import Double, Refusal

pytestmark = pytest.mark.anyio


class Given:
    """Messages that are there already; a callable is called in place of a message."""

    def __init__(self, *messages) -> None:
        self.messages = list(messages)

    async def read(self) -> str | None:
        return self.messages.pop(0) if self.messages else None


async def chat(double: Double, *messages: str, system: str | None = None, **options) -> bool:
    async with Client(InProcess(double.app()), "http://localhost") as client:
        warned: list[str] = []
        conversation = Conversation(client, system=system, asked={}, warn=warned.append)
        went_well = await Repl(conversation, Given(*messages), **options).run()
        double.warned = warned
        return went_well


def asked(double: Double) -> list[list[tuple[str, str]]]:
    """The (role, content) pairs of each request."""
    return [[(m["role"], m["content"]) for m in body["messages"]] for _, body in double.asked]


async def test_turns_follow_each_other_and_answers_go_to_stdout(capsys):
    double = Double()
    assert await chat(double, "one", "two", system="brief")
    assert asked(double) == [
        [("system", "brief"), ("user", "one")],
        [("system", "brief"), ("user", "one"), ("assistant", "Hello"), ("user", "two")],
    ]
    assert capsys.readouterr() == ("Hello\nHello\n", "")


@pytest.mark.parametrize("word", ["/bye", "/exit"])
async def test_bye_leaves(word):
    double = Double()
    assert await chat(double, word, "never asked")
    assert double.asked == []


@pytest.mark.parametrize("word", ["/help", "/?"])
async def test_help_lists_the_commands(word, capsys):
    await chat(Double(), word)
    assert capsys.readouterr() == ("", HELP + "\n")


async def test_clear_forgets_the_turns_and_keeps_the_system_prompt():
    double = Double()
    await chat(double, "one", "/clear", "two", system="brief")
    assert asked(double)[-1] == [("system", "brief"), ("user", "two")]


async def test_system_sets_and_shows_the_system_prompt(capsys):
    double = Double()
    await chat(double, "/system", "/system You are brief. ", "/system", "one")
    assert asked(double) == [[("system", "You are brief."), ("user", "one")]]
    said = capsys.readouterr().err
    assert "system prompt: (none)" in said
    assert "system prompt: You are brief." in said


async def test_retry_drops_the_last_answer_and_asks_again():
    double = Double()
    await chat(double, "one", "two", "/retry")
    assert asked(double)[1] == asked(double)[2]


async def test_retry_with_nothing_asked_yet(capsys):
    double = Double()
    assert await chat(double, "/retry", "one", "/clear", "/retry")
    assert len(double.asked) == 1
    assert capsys.readouterr().err.count("nothing was asked yet") == 2


@pytest.mark.parametrize(("word", "hint"), [("/byee", "did you mean /bye?"), ("/xyz", "/help lists the commands")])
async def test_an_unknown_command_says_so_with_the_nearest(word, hint, capsys):
    double = Double()
    await chat(double, f"{word} and more")
    assert double.asked == []
    assert capsys.readouterr().err == f"error: unknown command {word}\nhint: {hint}\n"


@pytest.mark.parametrize("message", ["/etc/passwd is a path", "/2 is a half", "a /bye inside"])
async def test_a_slash_alone_makes_no_command(message):
    double = Double()
    await chat(double, message)
    assert asked(double) == [[("user", message)]]


async def test_empty_messages_ask_nothing():
    double = Double()
    await chat(double, "", "  ", "\n")
    assert double.asked == []


@pytest.mark.parametrize("midway", [False, True])
async def test_a_failed_turn_is_rolled_back_and_the_loop_goes_on(midway, capsys):
    double = Double()

    def answer(body):
        fails = len(double.asked) == 2
        double.fails_midway = fails and midway
        return Refusal(500, "the forward failed") if fails and not midway else ["Hello"]

    double.answer = answer
    assert not await chat(double, "one", "two", "three", "/retry")
    kept = [("user", "one"), ("assistant", "Hello")]
    assert asked(double)[2:] == [[*kept, ("user", "three")], [*kept, ("user", "three")]]
    assert capsys.readouterr().err == "error: the forward failed\n"


async def test_retry_asks_again_what_failed():
    double = Double()
    double.answer = lambda body: Refusal(500, "no") if len(double.asked) == 2 else ["Hello"]
    await chat(double, "one", "one", "/retry", "two")
    turn = [("user", "one"), ("assistant", "Hello")]
    assert asked(double)[2:] == [[*turn, ("user", "one")], [*turn, *turn, ("user", "two")]]


async def test_an_error_that_is_fatal_ends_the_loop():
    double = Double(answer=lambda body: Refusal(503, "the model did not load", "model_not_loaded"))
    with pytest.raises(EngineGone, match="the model did not load"):
        await chat(double, "one", "two", fatal=(EngineGone,))
    assert not await chat(double, "one")


async def test_an_interrupt_stops_the_answer_and_drops_its_turn(capsys):
    double = Double(hold=True)

    async def interrupt() -> None:
        await double.started.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await double.left.wait()
        double.hold = False

    before = signal.getsignal(signal.SIGINT)
    interrupting = asyncio.ensure_future(interrupt())
    assert await chat(double, "one", "two")
    await interrupting
    assert asked(double) == [[("user", "one")], [("user", "two")]]
    assert capsys.readouterr() == ("Hello\nHello\n", STOPPED + "\n")
    assert signal.getsignal(signal.SIGINT) == before


async def test_a_model_without_a_template_is_given_the_plain_transcript_and_that_is_said_once():
    double = Double()
    double.answer = lambda body: Refusal(400, "no", "no_chat_template") if "messages" in body else [" and so on"]
    assert await chat(double, "one", "two", system="Once")
    assert [(path.rpartition("/")[2], body.get("prompt")) for path, body in double.asked] == [
        ("completions", None),
        ("completions", "Once\n\none"),
        ("completions", "Once\n\none\n\n and so on\n\ntwo"),
    ]
    assert double.warned == [NO_TEMPLATE]


async def test_an_answer_that_was_cut_says_so(capsys):
    double = Double(finish_reason="length")
    await chat(double, "one", max_tokens=2)
    await chat(double, "one")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "(cut at 2 tokens by --max-tokens 2; without it the answer runs to its end)"
    assert second == "(cut at 2 tokens: the context is full, or the server allows no more)"


async def test_stats_are_one_line_of_talk(capsys):
    await chat(Double(), "one", stats=True)
    said = capsys.readouterr().err
    assert said.startswith("prompt: 4 tokens, 40.0 tokens/s | new: 2 tokens, 20.0 tokens/s | first token after 0.")
    assert said.count("\n") == 1
