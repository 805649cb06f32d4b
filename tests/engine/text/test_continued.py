"""A reply that the prompt has begun: its filter is where the text so far leaves it, and tells none of that."""

import pytest

from engine.text.continued import Continued
from engine.text.filter import Markup
from tests.replies import CALL, chunkings

TAGS = Markup(("<think>", "</think>"), (("<tool_call>", "</tool_call>"),))
CHANNELS = Markup(
    harmony=True, calls=(("<|channel|>", "<|call|>"),), opening="<|start|>assistant<|channel|>final<|message|>"
)

CASES = {
    "an answer": (TAGS, "The answer", " is <think>4</think>.", [("answer", " is <think>4</think>.")]),
    "white space": (TAGS, "The answer ", "is", [("answer", "is")]),
    "nothing more": (TAGS, "The answer ", "", []),
    "a thought": (TAGS, "<think>\nI plan", " it.</think>\n\nSo", [("reasoning", " it."), ("answer", "So")]),
    "behind a thought": (TAGS, "<think>I plan</think>\n", "So <think>", [("answer", "So <think>")]),
    "half a tag that is one": (TAGS, "<think>I plan</th", "ink>So", [("answer", "So")]),
    "half a tag that is none": (TAGS, "<think>I <", "3", [("reasoning", "3")]),
    "code": (TAGS, "See `", f"{CALL}`", [("answer", f"{CALL}`")]),
    "a call behind": (TAGS, "So ", CALL, [("call", CALL)]),
    "a call that is half there": (TAGS, "So <tool", CALL[5:], [("call", CALL)]),
    "a message": (CHANNELS, "The answer", " is 4<|return|>", [("answer", " is 4")]),
    "half a token": (CHANNELS, "The answer<|", "3", [("answer", "3")]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_comes_behind_the_text(name: str) -> None:
    markup, begun, text, expected = CASES[name]
    continued = Continued.of(markup, begun)
    assert not continued.breaks_off_in_call
    for chunks in chunkings(text):
        filter_ = continued.filter()
        assert filter_.num_held == 0
        parts = [part for chunk in chunks for part in filter_.feed(chunk)]
        parts += filter_.finish()
        told = [[part.kind, part.text] for part in parts if part.kind != "markup"]
        for at in range(len(told) - 1, 0, -1):
            if told[at][0] == told[at - 1][0]:
                told[at - 1][1] += told.pop(at)[1]
        assert told == [list(part) for part in expected]
        assert filter_.num_held == 0


def test_is_it_thinking() -> None:
    assert Continued.of(TAGS, "<think>\nI plan").filter().is_reasoning
    assert not Continued.of(TAGS, "I plan").filter().is_reasoning


def test_a_call_that_has_begun() -> None:
    for begun in (CALL[:20], f"So {CALL[:-1]}"):
        assert Continued.of(TAGS, begun).breaks_off_in_call
    assert not Continued.of(TAGS, CALL).breaks_off_in_call
    assert not Continued.of(Markup(TAGS.think), CALL[:20]).breaks_off_in_call
