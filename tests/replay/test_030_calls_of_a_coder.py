"""Cases 30 and 32: a coder's call is one in every chunking, with its opening tag or without."""

import json

import pytest

from tests.engine.text.markups import markup_of, tool_calls_of
from tests.replies import chunkings, reply

LISTS = {
    "type": "function",
    "function": {"name": "list_directory", "parameters": {"properties": {"path": {"type": "string"}}}},
}
OPENS = {
    "type": "function",
    "function": {
        "name": "mcp__chrome-devtools__new_page",
        "parameters": {"properties": {"url": {"type": "string"}}},
    },
}
CALLS = {
    "whole": (
        "<tool_call>\n<function=list_directory>\n<parameter=path>\n/tmp\n</parameter>\n</function>\n</tool_call>",
        ("list_directory", {"path": "/tmp"}),
    ),
    "without the tag": (
        "<function=mcp__chrome-devtools__new_page><parameter=url>https://x</parameter></function>",
        ("mcp__chrome-devtools__new_page", {"url": "https://x"}),
    ),
    "with its end alone": (
        "<function=list_directory>\n<parameter=path>\n/tmp\n</parameter>\n</function>\n</tool_call>",
        ("list_directory", {"path": "/tmp"}),
    ),
}


@pytest.mark.parametrize("before", ["", "I will look.\n"])
@pytest.mark.parametrize("kind", CALLS)
def test_no_markup_is_text(kind: str, before: str) -> None:
    text, (name, arguments) = CALLS[kind]
    markup, calls = markup_of("qwen3_coder"), tool_calls_of("qwen3_coder")
    for chunks in chunkings(before + text):
        said, thought, called, reason = reply(markup, calls, chunks, tools=[LISTS, OPENS])
        assert [(one, json.loads(given)) for one, given in called] == [(name, arguments)], chunks
        assert (said, thought, reason) == (before.rstrip(), "", "tool_calls"), chunks
