"""The finish step: when a row ends, and what text is released by then."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.finish import FinishStep, StopMatcher, loops
from engine.request import Loops, Request, Row, ThinkingBudget, TokenLogprob
from engine.text.filter import THINK, Markup

END = 0


def decode(ids):
    return "".join(chr(i) for i in ids)


def run(text, *, end=False, max_tokens=1000, stop=(), ignore_eos=False):
    """Feed the characters of `text` as tokens; return the released pieces and the reason."""
    step = FinishStep(decode, frozenset({END}))
    request = Request("r", (65,), max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos)
    row = Row(request, max_tokens, 0, step.open(request))
    pieces = []
    for token in [ord(c) for c in text] + [END] * end:
        output = step.finish(row, token, 1.0)
        pieces.append(output.text)
        if output.finish_reason:
            break
    return pieces, row.finish_reason


def reference(text, stops):
    """What any chunking must release: character by character, the first stop to be complete ends it."""
    for at in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:at].endswith(stop)]
        if hits:
            return text[: at - max(map(len, hits))], True
    return text, False


@pytest.mark.parametrize(
    ("text", "stops", "found"),
    [
        ("abSTOP", ("OP", "STOP"), "STOP"),
        ("ab", ("STOP",), ""),
        ("abST", ("STOP",), ""),
        ("a6, 5", (", ", "6, 5"), ", "),
    ],
)
def test_the_stop_string_that_ended_a_row_is_known(text, stops, found):
    step = FinishStep(decode, frozenset({END}))
    request = Request("r", (65,), stop=stops)
    row = Row(request, 1000, 0, step.open(request))
    for token in (*map(ord, text), END):
        if row.finish_reason is None:
            step.finish(row, token, 1.0)
    assert (row.finish_reason, row.stop_string) == ("stop", found)


def test_end_token_is_a_stop_and_shows_no_text():
    assert run("Hi", end=True) == (["H", "i", ""], "stop")


def test_end_token_is_text_when_ignored():
    pieces, reason = run("Hi", end=True, max_tokens=3, ignore_eos=True)
    assert ("".join(pieces), reason) == ("Hi\0", "length")


def test_bound_on_new_tokens_is_length():
    assert run("Hello", max_tokens=3) == (["H", "e", "l"], "length")


def test_end_token_at_the_bound_is_a_stop():
    assert run("Hi", end=True, max_tokens=3)[1] == "stop"


def test_text_held_for_a_stop_that_never_comes_is_released():
    pieces, reason = run("abcST", end=True, stop=("STOP",))
    assert ("".join(pieces), reason) == ("abcST", "stop")
    pieces, reason = run("abcST", max_tokens=5, stop=("STOP",))
    assert ("".join(pieces), reason) == ("abcST", "length")


def test_a_stop_completed_by_the_last_allowed_token_is_a_stop():
    pieces, reason = run("abSTOP", max_tokens=6, stop=("STOP",))
    assert ("".join(pieces), reason) == ("ab", "stop")


@pytest.mark.parametrize("stops", [("6",), ("5, 6",), ("6", "5, ", ", 6", "4"), ("aab", "ab"), ("never",)])
@pytest.mark.parametrize("text", ["1, 2, 3, 4, 5, 6, 7", "aaaab", "5, 5, 6"])
def test_every_chunking_of_a_text_stops_alike(text, stops):
    expected = reference(text, stops)
    for sizes in itertools.product((1, 2, 3, 5), repeat=3):
        matcher, released, stopped, at = StopMatcher(stops), "", False, 0
        for size in itertools.cycle(sizes):
            if stopped or at >= len(text):
                break
            piece, stopped = matcher.feed(text[at : at + size])
            released, at = released + piece, at + size
        assert (released + ("" if stopped else matcher.flush()), stopped) == expected


@given(
    chunks=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_stop_matching_does_not_depend_on_the_chunks(chunks, stops):
    matcher, released, stopped = StopMatcher(stops), "", False
    for chunk in chunks:
        piece, stopped = matcher.feed(chunk)
        released += piece
        if stopped:
            break
    assert (released + ("" if stopped else matcher.flush()), stopped) == reference("".join(chunks), stops)


def told(text, *, end=False, max_tokens=1000, stop=()):
    """The pieces with the tokens whose logprobs came with them, the rest of the answer's, and the offsets."""
    step = FinishStep(lambda ids: bytes(ids).decode(errors="replace"), frozenset({END}))
    request = Request("r", (65,), max_tokens=max_tokens, stop=stop, top_logprobs=0)
    row = Row(request, max_tokens, 0, step.open(request))
    pieces, offsets = [], []
    for token in [*text.encode(), *[END] * end]:
        output = step.finish(row, token, 1.0, TokenLogprob(token, -0.5))
        pieces.append((output.text, bytes(logprob.token for logprob in output.logprobs)))
        offsets += [logprob.offset for logprob in output.logprobs]
        if output.finish_reason:
            break
    return pieces, offsets


def test_logprobs_come_with_the_text_of_their_token():
    assert told("Hi", end=True) == ([("H", b"H"), ("i", b"i"), ("", b"")], [0, 1])
    assert told("aéb", max_tokens=4)[0] == [("a", b"a"), ("", b""), ("é", "é".encode()), ("b", b"b")]
    assert told("aéb", max_tokens=4)[1] == [0, 1, 1, 2]


def test_logprobs_are_held_with_the_text_that_may_become_a_stop():
    pieces, offsets = told("aSTxSTOPz", stop=("STOP",))
    assert pieces == [("a", b"a"), ("", b""), ("", b""), ("STx", b"STx"), *[("", b"")] * 4]
    assert offsets == [0, 1, 2, 3]
    assert told("aST", stop=("STOP",), end=True)[0][-1] == ("ST", b"ST")
    assert told("aST", stop=("STOP",), max_tokens=3)[0][-1] == ("ST", b"ST")


def test_an_incomplete_character_at_the_end_has_no_text_and_logprobs_all_the_same():
    pieces, _ = told("a€", max_tokens=3)
    assert pieces == [("a", b"a"), ("", b""), ("", "€".encode()[:2])]


@given(
    text=st.text("abé€", max_size=12),
    stops=st.lists(st.text("abé€", min_size=1, max_size=3), max_size=3),
    max_tokens=st.integers(1, 20),
)
def test_logprobs_cover_the_text_and_hardly_more(text, stops, max_tokens):
    """All that is shown is told, in order, and of what is not shown at most an incomplete character."""
    pieces, offsets = told(text, stop=tuple(stops), max_tokens=max_tokens, end=True)
    shown, spelled = "".join(piece for piece, _ in pieces), b"".join(tokens for _, tokens in pieces)
    assert spelled.decode(errors="ignore").startswith(shown)
    assert len(spelled) - len(shown.encode()) < 3
    assert offsets == sorted(offsets)
    assert all(offset <= len(shown) for offset in offsets)


def loops_by_text(text, bounds):
    return any(
        text.endswith(text[len(text) - size :] * bounds.count) and len(text) >= size * bounds.count
        for size in range(bounds.min_tokens, bounds.max_tokens + 1)
    )


@given(
    text=st.text("ab", max_size=24), smallest=st.integers(1, 3), more=st.integers(0, 3), count=st.integers(2, 4)
)
def test_a_loop_is_the_same_over_and_over(text, smallest, more, count):
    bounds = Loops(smallest, smallest + more, count)
    assert loops([ord(c) for c in text], bounds) == loops_by_text(text, bounds)
    assert not loops([ord(c) for c in text], None)


def test_an_answer_that_loops_ends_and_keeps_what_it_said():
    step = FinishStep(decode, frozenset({END}))
    request = Request("r", (65,), loops=Loops(1, 4, 3))
    row = Row(request, 1000, 0, step.open(request))
    outputs = [step.finish(row, ord(c), 1.0) for c in "xabcabcabc"]
    assert "".join(output.text for output in outputs) == "xabcabcabc"
    assert [output.finish_reason for output in outputs] == [None] * 9 + ["stop"]


def thinking(text, *, opening="<think>\n", budget=None, stop=(), max_tokens=1000):
    """Run `text` through the finish step with think tags; parts by kind, forced tokens, the row."""
    bound = None if budget is None else ThinkingBudget(budget, tuple(map(ord, "</think>")))
    request = Request("r", (65,), markup=Markup(THINK, opening=opening), thinking=bound, stop=stop)
    step = FinishStep(decode, frozenset({END}))
    row = Row(request, max_tokens, 0, step.open(request))
    step.begin(row)
    said: dict[str, str] = {}
    for letter in [*text, chr(END)]:
        token = row.forced[0] if row.forced else ord(letter)
        output = step.finish(row, token, 1.0)
        for part in output.parts:
            said[part.kind] = said.get(part.kind, "") + part.text
        if output.finish_reason:
            return said, output
    raise AssertionError("the row never ended")


def test_stop_strings_are_not_looked_for_in_a_thought():
    said, output = thinking("stop here</think>go on, stop there", stop=("stop",))
    assert (said["reasoning"], said["answer"]) == ("stop here", "go on, ")
    assert output.finish_reason == "stop"


def test_a_stop_string_is_not_put_together_across_a_thought():
    said, _ = thinking("S<think>x</think>TOP", opening="", stop=("STOP",))
    assert said == {"answer": "S<think>x</think>TOP"}


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_thought_is_ended_when_its_budget_is_used_up(budget):
    said, output = thinking("abc"[:budget] + "........" + "Hi", budget=budget)
    assert said.get("reasoning", "") == "abc"[:budget]
    assert said["answer"] == "Hi"
    assert output.timings.reasoning_n == budget + len("</think>")


def test_a_thought_within_its_budget_is_left_alone():
    said, output = thinking("abc</think>Hi", budget=100)
    assert (said["reasoning"], said["answer"], output.timings.reasoning_n) == ("abc", "Hi", 11)
