"""Case 45: a piece that holds the end of a thought and the beginning of the answer is shared between them."""

from engine.text.filter import THINK, Markup
from engine.text.toolcalls import ToolCalls
from tests.replies import chunkings, reply

TEXT = "It is nearly done</think>Answer"
MARKUP = Markup(THINK, opening="<think>\n")


def test_every_split() -> None:
    for chunks in chunkings(TEXT, most_cuts=2):
        found = reply(MARKUP, ToolCalls(MARKUP), chunks)
        assert found == ("Answer", "It is nearly done", [], "stop"), chunks
