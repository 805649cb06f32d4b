"""Markdown that is still being written: whatever its pieces and the size of the screen, it ends up the same."""

import itertools
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_cli import markdown
from mlxcel_cli.markdown import Markdown
from tests.cli.screen import Screen

pytestmark = pytest.mark.anyio

CODE = 'def f(x):\n\t"""Say."""\n\n    return {"a": x}  # ' + "a long remark, " * 12 + "the end"
SAMPLE = f"""# A heading

Here is **bold text**, *emphasis*, `code`, a [link](http://x.y/z), <http://auto.link>, a ![picture](http://p.q/r)
and <div>HTML</div>. 2 * 3 * 4.

1. First
2. Second with **bold
   text**
   - nested
   - two

     ```sh
     ls -l
     ```
3. Third

```python
{CODE}
```
- a list
- that follows

| a | b |
|---|--:|
| 1 | 日本語 |
| long cell | 3 |

> a quote
> goes on

[ref]: http://not.hidden

---
Done.
"""
PARTS = ["a", " ", "\n", "\n\n", "- ", "1. ", "```", "`", "**", "| a |", "|--|", "> ", "# ", "<b>", "~"]
PARTS += ["\t", "日", "---"]
SHOWN = """\
A heading

Here is bold text, emphasis, code, a link (http://x.y/z), http://auto.link, a ![picture](http://p.q/r)
and <div>HTML</div>. 2 * 3 * 4.
"""


@pytest.fixture(autouse=True)
def _drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "REDRAW_S", 0.0)


def shown(pieces: list[str], columns: int = 120, lines: int = 40) -> Screen:
    screen = Screen(columns, lines)
    answer = Markdown(screen.write, lambda: os.terminal_size((screen.columns, screen.lines)))
    for piece in pieces:
        answer.feed(piece)
    answer.end()
    return screen


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % len(text) for place in at)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def test_what_a_person_sees():
    text = shown([SAMPLE], lines=200).text
    assert text.startswith(SHOWN)
    assert CODE.replace("\t", " " * 8) in text
    for part in (" 3 Third", " • that follows", "long cell", "▌ goes on", "[ref]: http://not.hidden", "Done."):
        assert part in text
    assert "**" not in text


@settings(max_examples=15, deadline=None)
@given(at=st.lists(st.integers(min_value=0), max_size=60), columns=st.integers(20, 120), lines=st.integers(3, 50))
def test_pieces_and_screens_make_no_difference_to_what_stands_there_in_the_end(at, columns, lines):
    assert shown(cut(SAMPLE, at), columns, lines).text == shown([SAMPLE], columns, 1000).text


@pytest.mark.parametrize("lines", [3, 24])
def test_letter_by_letter_nothing_above_the_screen_is_written_again(lines):
    assert shown(list(SAMPLE), 80, lines).text == shown([SAMPLE], 80, 1000).text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=40))
def test_any_text_at_all_in_any_pieces(pieces):
    whole = shown(["".join(pieces)], 30, 1000)
    assert shown(pieces, 30, 5).text == whole.text


def test_code_is_copied_as_it_is():
    screen = shown(list(f"```python\n{CODE}\n```\n"), 40, 10)
    assert screen.text == f"```python\n{CODE}\n```".replace("\t", " " * 8)


def test_code_that_is_cut_is_closed():
    assert shown(["Look:\n\n~~~sh\nls"]).text == "Look:\n\n~~~sh\nls\n~~~"
    assert shown(["```"]).text == "```\n```"


def test_plain_text_is_only_added_to():
    words = [f"word{number} " for number in range(200)]
    assert shown(words, 80, 24).num_erased == 0


def test_a_long_answer_erases_little():
    random.seed(1)
    text = SAMPLE * 4
    pieces = cut(text, [random.randrange(len(text)) for _ in range(len(text) // 4)])
    screen = shown(pieces, 80, 24)
    assert screen.num_erased < 20 * len(text)


def test_numbers_of_a_list_go_on_while_its_items_are_kept():
    text = "".join(f"1. item {number}\n" for number in range(1, 5))
    assert shown(list(text)).text == "\n".join(f" {number} item {number}" for number in range(1, 5))


def test_line_breaks_stay():
    assert shown(["Roses are red,\nViolets are blue."]).text == "Roses are red,\nViolets are blue."


def test_marks_that_are_open_are_not_shown_meanwhile():
    screen = Screen(80, 24)
    answer = Markdown(screen.write, lambda: os.terminal_size((80, 24)))
    for piece in ("It is **", "very", " good", "** and `co", "de"):
        answer.feed(piece)
        assert "*" not in screen.text
        assert "`" not in screen.text
    answer.end()
    assert screen.text == "It is very good and `code"


async def test_what_comes_quickly_is_drawn_a_little_later(monkeypatch):
    monkeypatch.setattr(markdown, "REDRAW_S", 3600.0)
    screen = Screen(80, 24)
    answer = Markdown(screen.write, lambda: os.terminal_size((80, 24)))
    for piece in ("one ", "two ", "three"):
        answer.feed(piece)
    assert screen.text == "one"
    answer.end()
    assert screen.text == "one two three"


def test_a_terminal_that_grows_narrower_or_wider_meanwhile():
    for columns in (30, 100):
        screen = Screen(60, 24)
        answer = Markdown(screen.write, lambda screen=screen: os.terminal_size((screen.columns, screen.lines)))
        answer.feed("one two three\n\nfour five six\n\n```\ncode\n")
        screen.columns = columns
        answer.feed("more\n```\nseven " + "eight " * 20)
        answer.end()
        assert screen.text.replace("\n", " ").split() == [
            *["one", "two", "three", "four", "five", "six", "```", "code", "more", "```", "seven"],
            *["eight"] * 20,
        ]
