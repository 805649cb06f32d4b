"""Cases 31 and 38: names and arguments are whole at every split, and nothing comes twice."""

import json

import pytest

from tests.engine.text.markups import markup_of, tool_calls_of
from tests.replies import chunkings, reply

READ = {"type": "function", "function": {"name": "read"}}
WEATHER = {"type": "function", "function": {"name": "get_current_weather"}}
ARGUMENTS = {"city": "Seattle", "state": "WA", "unit": "celsius"}
TEXTS = {
    "a header": ('[TOOL_CALLS]read[ARGS]{"path":"a.py"}', [("read", {"path": "a.py"})]),
    "two headers": (
        '[TOOL_CALLS]read[ARGS]{"path":"a.py"}[TOOL_CALLS]read[ARGS]{"path":"b.py"}',
        [("read", {"path": "a.py"}), ("read", {"path": "b.py"})],
    ),
    "a list": (
        f"[TOOL_CALLS] [{json.dumps({'name': 'get_current_weather', 'arguments': ARGUMENTS})}]",
        [("get_current_weather", ARGUMENTS)],
    ),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_every_split(kind: str) -> None:
    text, expected = TEXTS[kind]
    for chunks in chunkings(text, most_cuts=2):
        said, _, called, _ = reply(markup_of("mistral"), tool_calls_of("mistral"), chunks, tools=[READ, WEATHER])
        assert [(name, json.loads(arguments)) for name, arguments in called] == expected, chunks
        assert said == "", chunks
