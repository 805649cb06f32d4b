"""Sizes, ages, tables, bars and errors as text."""

import io
import sys
from contextlib import redirect_stderr

import pytest

from engine.errors import UserError
from mlxcel_cli import render


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_900, "99.9 kB"),
        (100_000, "100 kB"),
        (999_600, "1.0 MB"),
        (92_871_040, "92.9 MB"),
        (4_500_000_000, "4.5 GB"),
        (10**12, "1.0 TB"),
        (10**15, "1000.0 TB"),
    ],
)
def test_sizes(num_bytes, text):
    assert render.size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "just now"), (59, "just now"), (60, "1 minute ago"), (7300, "2 hours ago"), (86400 * 3, "3 days ago")],
)
def test_ages(seconds, text):
    assert render.age(seconds) == text


def test_a_bar_is_a_size_where_the_total_is_unknown():
    assert render.bar(1500, None) == "1.5 kB"
    assert render.bar(50, 100) == "[############............]  50% 50 B of 100 B"
    assert render.bar(200, 100).startswith("[########################] 100%")


def test_columns_are_aligned():
    assert render.table([("A", "B"), ("long", "1"), ("x", "22")], right=frozenset({1})) == (
        "A      B\nlong   1\nx     22\n"
    )


def test_an_error_is_one_line_and_its_hint_another(capsys):
    render.failure(UserError("first\n  second", hint="do that"))
    render.failure(UserError(""))
    assert capsys.readouterr() == ("", "error: first second\nhint: do that\nerror: UserError\n")


def test_colour_is_for_terminals(screen):
    with redirect_stderr(screen):
        render.error("bad")
    assert screen.getvalue() == "\x1b[31merror: bad\x1b[0m\n"


@pytest.mark.parametrize("environment", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_is_for_those_who_allow_it(environment, screen, monkeypatch):
    monkeypatch.setenv(*environment)
    with redirect_stderr(screen):
        render.error("bad")
    assert screen.getvalue() == "error: bad\n"


def test_progress_is_a_line_that_goes_away_on_a_terminal(screen):
    with redirect_stderr(screen), render.fetching("model") as progress:
        progress("fetch", 50, 100)
        progress("fetch", 51, 100)
    shown, gone = "\r\x1b[Kfetch model [############............]  50% 50 B of 100 B", "\r\x1b[K"
    assert screen.getvalue() == shown + gone


def test_progress_is_a_line_for_each_stage_elsewhere(capsys):
    with render.fetching("model") as progress:
        for stage in ("fetch", "fetch", "import"):
            progress(stage, 1, 2)
    assert capsys.readouterr() == ("", "fetch model\nimport model\n")


def test_talk_without_a_stderr_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    render.error("bad")
    assert not render.is_terminal(None)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("one two", ["one two"]),
        ("one two three four", ["one two", "three four"]),
        ("a-longer-word-than-fits and more", ["a-longer-word-than-fits", "and more"]),
        ("12345 7890", ["12345 7890"]),
        ("12345 78901", ["12345", "78901"]),
        ("\u540d\u524d \u540d\u524d\u540d", ["\u540d\u524d", "\u540d\u524d\u540d"]),
        ("  indented\n\nnext", ["  indented", "", "next"]),
    ],
)
def test_lines_are_broken_between_words(text, lines):
    assert render.wrapped(text, 10).split("\n") == lines


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("model | 5 tokens", 16, "model | 5 tokens"),
        ("model | 5 tokens", 15, "model | 5 to..."),
        ("model | 5 tokens", 9, "model..."),
        ("\u540d\u524d\u540d\u524d", 8, "\u540d\u524d\u540d\u524d"),
        ("\u540d\u524d\u540d\u524d", 7, "\u540d\u524d..."),
        ("\u540d\u524d\u540d\u524d", 6, "\u540d..."),
        ("model", 2, ".."),
        ("model", 0, ""),
    ],
)
def test_what_is_too_long_for_a_line_ends_in_dots(text, columns, shown):
    assert render.shortened(text, columns) == shown


def test_remarks_are_broken_on_a_terminal_alone(screen, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    render.note("one two three four")
    assert capsys.readouterr().err == "one two three four\n"
    with redirect_stderr(screen):
        render.note("one two three four")
    assert screen.getvalue() == "\x1b[2mone two\nthree four\x1b[0m\n"
