"""The chat loop: commands, rolled-back turns, stopped answers."""

import asyncio
import os
import re
import signal

import pytest

from mlxcel_cli import chats, transcript
from mlxcel_cli.client import Client
from mlxcel_cli.conversation import NO_TEMPLATE, Conversation
from mlxcel_cli.errors import EngineGone
from mlxcel_cli.repl import STOPPED, Repl
from mlxcel_cli.slash import help_text
from mlxcel_cli.transport import InProcess
from mlxcel_cli.view import View
from tests.cli.double import Double, Refusal

pytestmark = pytest.mark.anyio


class Given:
    """Messages that are there already, and the status that each was asked with."""

    def __init__(self, *messages, edits: bool) -> None:
        self.edits = edits
        self.messages = list(messages)
        self.statuses: list[str] = []

    async def read(self, status: str = "") -> str | None:
        self.statuses.append(status)
        return self.messages.pop(0) if self.messages else None


async def chat(
    double: Double, *messages: str, system: str | None = None, fields=(), edits: bool = False, **options
) -> bool:
    async with Client(InProcess(double.app()), "http://localhost") as client:
        warned: list[str] = []
        conversation = Conversation(client, system=system, asked=dict(fields), warn=warned.append)
        lines = Given(*messages, edits=edits)
        went_well = await Repl(conversation, lines, **options).run()
        double.warned, double.statuses = warned, lines.statuses
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
    assert capsys.readouterr() == ("", help_text(edits=False) + "\n")


async def test_help_names_keys_only_where_they_do_something(capsys):
    keys = ("Alt-Enter", "Ctrl-R", "TAB")
    for edits in (True, False):
        await chat(Double(), "/help", edits=edits)
        said = capsys.readouterr().err
        assert [key in said for key in keys] == [edits] * len(keys)
        assert "Ctrl-C" in said
        assert '"""' in said


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


async def test_halves_of_characters_in_an_answer_do_not_keep_the_chat_from_going_on(tmp_path):
    double = Double(answer=lambda body: ["a\ud83d", "\ude00b\ud83d"])
    assert await chat(double, "one", "two", kept=chats.kept(tmp_path, "work"))
    assert asked(double)[1][1] == ("assistant", "a\U0001f600b\ufffd")
    assert len(transcript.read(tmp_path / "work.json")) == 4


async def test_an_answer_that_was_cut_says_so(capsys):
    double = Double(finish_reason="length")
    await chat(double, "one", fields={"max_tokens": 2})
    await chat(double, "one")
    await chat(double, "/set max-tokens 2", "one", fields={"max_tokens": 9})
    await chat(double, "one", fields={"max_tokens": 2}, bounded_by="template brief: max_tokens")
    first, second, _, third, fourth = capsys.readouterr().err.splitlines()
    assert third == "(cut at 2 tokens by /set max-tokens 2; without it the answer runs to its end)"
    assert fourth == "(cut at 2 tokens by template brief: max_tokens 2; without it the answer runs to its end)"
    assert first == "(cut at 2 tokens by --max-tokens 2; without it the answer runs to its end)"
    assert second == "(cut at 2 tokens: the context is full, or the server allows no more)"


async def test_undo_drops_the_last_turn_and_then_the_one_before(capsys):
    double = Double()
    await chat(double, "one", "two", "three", "/undo", "/undo", "four", system="brief")
    turn = [("user", "one"), ("assistant", "Hello")]
    assert asked(double)[-1] == [("system", "brief"), *turn, ("user", "four")]
    assert capsys.readouterr().err == "(dropped: three)\n(dropped: two)\n"


async def test_undo_after_a_file_tells_the_question_and_not_the_files_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("secret ```\n")
    (tmp_path / "b c").write_text("secret\n\nb:\n")
    messages = ["/file a", "/file b c", "Why?\nAnd how?", "/undo", "/file a", "w" * 99, f"/save {tmp_path / 's'}"]
    await chat(Double(), *messages, f"/load {tmp_path / 's'}", "/undo")
    said = capsys.readouterr().err.splitlines()
    assert said[2] == "(dropped: Why? And how? (with a, b c))"
    assert said[-2] == f'(1 turn, the last "{"w" * 57}... (with a)" loaded from {tmp_path / "s"})'
    assert said[-1] == f"(dropped: {'w' * 57}... (with a))"


async def test_undo_with_nothing_left(capsys):
    double = Double()
    assert await chat(double, "/undo", "one", "/undo", "/undo", "/retry")
    assert asked(double) == [[("user", "one")], [("user", "one")]]
    assert capsys.readouterr().err.count("(there is no turn to drop)") == 2


async def test_undo_after_a_failed_turn_drops_the_one_that_was_kept():
    double = Double()
    double.answer = lambda body: Refusal(500, "no") if len(double.asked) == 2 else ["Hello"]
    await chat(double, "one", "two", "/undo", "three")
    assert asked(double)[-1] == [("user", "three")]


async def test_set_changes_the_fields_of_later_answers(capsys):
    double = Double()
    messages = ["one", "/set temp 0.5", '/set stop "a\\nb"', "/set max-tokens 7", "two", "/set temp default"]
    assert await chat(double, *messages, "/set max_tokens -1", "three", fields={"seed": 3, "top_p": 0.5})
    fields = [
        {k: v for k, v in body.items() if k not in ("messages", "stream", "stream_options")}
        for _, body in double.asked
    ]
    kept = {"seed": 3, "top_p": 0.5}
    assert fields == [
        kept,
        {**kept, "temperature": 0.5, "stop": ["a\nb"], "max_tokens": 7},
        {**kept, "stop": ["a\nb"]},
    ]
    assert capsys.readouterr().err.splitlines() == [
        "(temp: 0.5)",
        '(stop: "a\\nb")',
        "(max-tokens: 7)",
        "(temp: default)",
        "(max_tokens: default)",
    ]


async def test_set_alone_shows_every_field(capsys):
    double = Double()
    await chat(double, "/set", "/set top-k", fields={"temperature": 0.5, "top_k": 4, "stop": ["a", "b c"]})
    *listed, last = capsys.readouterr().err.splitlines()
    assert [line.split(maxsplit=1) for line in listed] == [
        ["temp", "0.5"],
        ["top_p", "default"],
        ["top_k", "4"],
        ["min_p", "default"],
        ["repeat_penalty", "default"],
        ["seed", "default"],
        ["max_tokens", "default"],
        ["stop", '"a" "b c"'],
        ["reasoning", "hide"],
        ["markdown", "off"],
        ["stats", "off"],
    ]
    assert last == "(top-k: 4)"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("tmp 1", "unknown setting tmp\nhint: did you mean temp?"),
        ("xyz 1", "unknown setting xyz\nhint: /set lists them"),
        ("xyz", "unknown setting xyz\nhint: /set lists them"),
        ("temp hot", "temp must be a number, not 'hot'"),
        ("temp nan", "temp must be a finite number, not nan"),
        ("temp -1", "temp must be at least 0, not -1"),
        ("top_p 2", "top_p must be at most 1, not 2"),
        ("top_k 1.5", "top_k must be a whole number, not '1.5'"),
        ("max_tokens -2", "max_tokens must be at least -1, not -2"),
        ("max_tokens many", "max_tokens must be a whole number, not 'many'"),
        ('stop ""', "stop: an empty text would end every answer before it begins"),
        ('stop "\\ud83d"', "stop is not UTF-8 text: half of a character, \\ud83d, at 0"),
        ('stop "a', 'stop: "a is not closed or has an escape that JSON does not know'),
    ],
)
async def test_set_refuses_what_does_not_do_and_changes_nothing(said, error, capsys):
    double = Double()
    assert not await chat(double, f"/set {said}", "one")
    assert capsys.readouterr().err == f"error: {error}\n"
    assert double.asked[0][1].keys() == {"messages", "stream", "stream_options"}


async def test_stats_shows_the_last_answers_numbers_and_on_shows_each(capsys):
    double = Double()
    await chat(double, "/stats", "one", "/stats", "/stats on", "two", "/stats off", "three")
    first, numbers, on, after, off = capsys.readouterr().err.splitlines()
    assert first == "(nothing was answered yet)"
    assert numbers.startswith("prompt: 4 tokens")
    assert after.startswith("prompt: 4 tokens")
    assert (on, off) == ("(numbers after every answer: on)", "(numbers after every answer: off)")


async def test_stats_knows_on_and_off(capsys):
    await chat(Double(), "/stats perhaps")
    assert (
        capsys.readouterr().err == "error: /stats does not know perhaps\nhint: /stats, /stats on or /stats off\n"
    )


async def test_a_saved_conversation_is_gone_on_with_later(tmp_path, capsys):
    double, file = Double(), tmp_path / "talk é.json"
    assert await chat(double, "one", f"/save {file}", system="brief")
    assert await chat(double, "other", f"/load {file}", "two", "/save", "/undo", "/undo", "/retry")
    start = [("system", "brief"), ("user", "one")]
    assert asked(double)[2] == [*start, ("assistant", "Hello"), ("user", "two")]
    assert asked(double)[3] == start
    said = capsys.readouterr().err
    assert f"(saved to {file})" in said
    assert f'(1 turn, the last "one", system prompt "brief" loaded from {file})' in said
    assert [message["content"] for message in transcript.read(file)] == ["brief", "one", "Hello", "two", "Hello"]


async def test_control_bytes_of_a_loaded_conversation_do_not_reach_the_terminal(tmp_path, capsys):
    title = "\x1b]0;title\x07"
    said = [{"role": role, "content": title} for role in ("system", "user", "assistant")]
    transcript.write(tmp_path / "a", said, replaces=False)
    await chat(Double(), f"/load {tmp_path / 'a'}", "/system", "/undo")
    assert "\x1b" not in capsys.readouterr().err


async def test_retry_after_load_asks_its_last_question_again(tmp_path):
    double, file = Double(), tmp_path / "talk.json"
    await chat(double, "one", f"/save {file}")
    await chat(double, f"/load {file}", "/retry")
    assert asked(double)[-1] == [("user", "one")]


async def test_the_status_tells_the_model_and_what_the_last_answer_took(tmp_path):
    (tmp_path / "a").write_text("x")
    double = Double()
    await chat(double, "one", "/clear", f"/file {tmp_path / 'a'}", name="double")
    taken = "2 tokens, 20.0 tokens/s | context 6 of 100 (6%)"
    assert double.statuses == ["double", f"double | {taken}", "double", "double | 1 file for the next message"]


async def test_a_server_that_does_not_tell_its_context_is_no_error():
    double = Double()
    double.props = double.health
    await chat(double, "one")
    assert double.statuses[1] == "2 tokens, 20.0 tokens/s | context 6 tokens"


async def test_files_go_with_the_next_message_and_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b c"):
        (tmp_path / name).write_text(f"text of {name}\n")
    double = Double()
    attached = ("/file", "/file a", "/file b c", "/file a", "/file")
    await chat(double, *attached, "Why?", "/undo", "/retry", "And?", "/file a", "/file -", "So?")
    quotes = "a:\n```\ntext of a\n```\n\nb c:\n```\ntext of b c\n```\n\nWhy?"
    assert [turns[-1][1] for turns in asked(double)] == [quotes, quotes, "And?", "So?"]
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["(no file with the next message)", "(a goes with the next message: 1 line, 10 B)"]
    assert said[4] == "(a, b c with the next message)"
    assert said[-1] == "(no file goes with the next message)"


async def test_a_file_that_is_none_is_refused_by_name_and_the_chat_goes_on(tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\0")
    double = Double()
    assert not await chat(double, f"/file {tmp_path / 'binary'}", "/file no", "one")
    assert asked(double) == [[("user", "one")]]
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {tmp_path / 'binary'} is not text: byte 0x00 at 0"
    assert second == "error: no cannot be read: No such file or directory"


async def test_tokens_counts_the_conversation_with_what_is_attached(tmp_path, capsys):
    (tmp_path / "a").write_text("one two three")
    await chat(Double(), "one two", "/tokens", f"/file {tmp_path / 'a'}", "/tokens", system="be brief")
    said = capsys.readouterr().err.splitlines()
    last = "; the last one and its answer, as in the status, 6 of 100 (6%))"
    assert said[0] == f"(the next prompt takes 5 of 100 (5%), without what you will ask{last}"
    assert said[2] == f"(the next prompt takes 11 of 100 (11%), without what you will ask{last}"


async def test_tokens_says_of_the_last_answer_what_the_status_and_stats_say(capsys):
    double = Double()
    await chat(double, "/tokens", "one", "/tokens", "/stats", "/undo", "/tokens", system="be brief")
    before, with_both, numbers, _, after = capsys.readouterr().err.splitlines()
    assert before == "(the next prompt takes 2 of 100 (2%), without what you will ask)"
    assert with_both.endswith("as in the status, 6 of 100 (6%))")
    assert "context 6 of 100 (6%)" in double.statuses[2]
    assert numbers.startswith("prompt: 4 tokens, 40.0 tokens/s | new: 2 tokens")
    assert after == before


async def test_a_server_that_does_not_count_tokens_is_named(capsys):
    double = Double()
    double.count_tokens = double.health
    assert not await chat(double, "/tokens")
    assert capsys.readouterr().err == "error: the server at http://localhost does not count tokens\n"


async def test_reasoning_is_folded_shown_and_hidden_as_set(capsys):
    double = Double(thinks=["I ", "plan."])
    fold, show = "/set reasoning fold", "/set reasoning show"
    await chat(double, "/reasoning", "one", fold, "two", "/reasoning", show, "three")
    said = capsys.readouterr()
    assert said.out == "Hello\n" * 3
    none, set_fold, folded, whole, set_show, thought, empty = said.err.splitlines()
    assert none == "(there was no reasoning)"
    assert (set_fold, set_show) == ("(reasoning: fold)", "(reasoning: show)")
    assert re.fullmatch(r"\(thought for \d\.\d s; /reasoning shows it\)", folded)
    assert (whole, thought, empty) == ("I plan.", "I plan.", "")


async def test_set_refuses_a_way_of_showing_that_there_is_not(capsys):
    assert not await chat(Double(), "/set reasoning loud")
    assert "reasoning must be one of show, fold, hide" in capsys.readouterr().err


async def test_a_chat_is_kept_after_every_change(tmp_path):
    double = Double()

    async def messages(*said: str) -> list[list[str]]:
        await chat(double, *said, kept=chats.kept(tmp_path, "work"))
        return [[message["content"] for message in transcript.read(path)] for path in sorted(tmp_path.iterdir())]

    assert await messages("/system brief", "/bye") == []
    assert await messages("one", "two") == [["one", "Hello", "two", "Hello"]]
    assert await messages("one", "two", "/undo", "/system brief") == [["brief", "one", "Hello"]]
    assert await messages("three", "/clear", "four") == [["four", "Hello"], ["three", "Hello"]]


async def test_a_loaded_conversation_is_another_chat(tmp_path):
    saved, folder = tmp_path / "saved.json", tmp_path / "sessions"
    await chat(Double(), "one", f"/save {saved}")
    await chat(Double(), "two", f"/load {saved}", "three", kept=chats.kept(folder, "work"))
    texts = [[message["content"] for message in transcript.read(path)] for path in folder.iterdir()]
    assert sorted(texts) == [["one", "Hello", "three", "Hello"], ["two", "Hello"]]
    assert len(transcript.read(saved)) == 2


async def test_a_chat_that_cannot_be_kept_says_so_once_and_goes_on(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "link.json").symlink_to("nothing")
    saved = tmp_path / "saved.json"
    places = ((tmp_path / "file" / "sessions", None, "cannot be made"), (tmp_path, "link", "is a link to a file"))
    for folder, name, why in places:
        double = Double()
        await chat(double, "one", "two", f"/save {saved}", kept=chats.kept(folder, name))
        assert [len(turns) for turns in asked(double)] == [1, 3]
        error, hint, last = capsys.readouterr().err.splitlines()
        assert error.startswith("error: this chat is not kept any more: ")
        assert why in error
        assert hint == "hint: /save FILE writes it elsewhere"
        assert last == f"(saved to {saved})"
        assert len(transcript.read(saved)) == 4
        saved.unlink()


async def test_a_chat_whose_file_cannot_be_looked_at_goes_on(tmp_path, capsys):
    double = Double()
    kept = chats.kept(tmp_path, "work")

    def answer(body) -> list[str]:
        (tmp_path / "work.json").unlink(missing_ok=True)
        (tmp_path / "work.json").symlink_to("work.json")
        return ["Hello"]

    double.answer = answer
    await chat(double, "one", "two", kept=kept)
    assert len(asked(double)[1]) == 3
    assert "error: this chat is not kept any more: " in capsys.readouterr().err


async def test_save_overwrites_nothing_but_its_own(tmp_path, capsys):
    file = tmp_path / "talk.json"
    file.write_text("precious")
    assert not await chat(Double(), "one", f"/save {file}")
    assert file.read_text() == "precious"
    assert capsys.readouterr().err == (
        f"error: {file} exists already\nhint: choose another name; nothing is overwritten\n"
    )
    other = tmp_path / "other.json"
    assert not await chat(Double(), "one", f"/save {other}", "/clear", "two", f"/save {other}", "/save")
    assert [message["content"] for message in transcript.read(other)] == ["one", "Hello"]
    said = capsys.readouterr().err
    assert f"error: {other} exists already" in said
    assert "error: /save needs a name the first time\nhint: /save FILE" in said


async def test_a_name_that_no_file_can_have_does_not_end_the_chat(tmp_path, capsys):
    double = Double()
    names = ("a\0b", "~a\0b")
    lines = [f"{command} {name}" for name in names for command in ("/save", "/load", "/file")]
    assert not await chat(double, "one", *lines, "two")
    assert len(asked(double)[1]) == 3
    assert capsys.readouterr().err.count("embedded null byte") == len(lines)


async def test_a_file_that_cannot_be_loaded_leaves_the_conversation_as_it_was(tmp_path, capsys):
    double = Double()
    assert not await chat(double, "one", f"/load {tmp_path / 'missing'}", "/load", "two")
    assert len(asked(double)[1]) == 3
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'missing'} cannot be read: " in said
    assert "error: /load needs the name of a file" in said


async def test_stats_are_one_line_of_talk(capsys):
    await chat(Double(), "one", shown=View(stats=True))
    said = capsys.readouterr().err
    assert said.startswith("prompt: 4 tokens, 40.0 tokens/s | new: 2 tokens, 20.0 tokens/s | first token after 0.")
    assert said.count("\n") == 1
