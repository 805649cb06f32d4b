"""The stream filter: nothing is lost or raised, no chunking matters, and what only looks like a tag is text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.filter import THINK, Markup
from engine.text.parts import Part, put
from tests.engine.text.markups import FAMILIES, THOUGHTS, markup_of, words_of

CALLS = (("<tool_call>", "</tool_call>"),)
MARKUP = Markup(THINK, CALLS)
HARMONY = markup_of("harmony", opening="<|start|>assistant")


def split(markup: Markup, chunks: list[str]) -> list[Part]:
    """The parts of a reply, those that belong together joined."""
    filter_ = markup.filter()
    parts: list[Part] = []
    for number in range(len(chunks) + 1):
        found = filter_.feed(chunks[number]) if number < len(chunks) else filter_.finish()
        for part in found:
            assert part.text, "an empty part"
            if parts and part.kind == parts[-1].kind == "markup":
                parts[-1] = Part("markup", parts[-1].text + part.text)
            else:
                put(parts, part.kind, part.text, closed=part.closed)
        taken = sum(map(len, chunks[: number + 1]))
        assert taken == sum(len(part.text) for part in parts) + filter_.num_held * (number < len(chunks))
    return parts


def shown(markup: Markup, text: str) -> list[tuple[str, str]]:
    """Kinds and texts but for the markup, the same for every chunking."""
    whole = split(markup, [text])
    assert split(markup, list(text)) == whole
    for at in range(1, len(text)):
        assert split(markup, [text[:at], text[at:]]) == whole
    assert "".join(part.text for part in whole) == text
    return [(part.kind, part.text) for part in whole if part.kind != "markup"]


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None)
@given(data=st.data())
def test_any_text_in_any_chunking_is_there_and_is_split_alike(name: str, data: st.DataObject) -> None:
    words = st.one_of(st.sampled_from(words_of(name)), st.text(max_size=4))
    text = "".join(data.draw(st.lists(words, max_size=10)))
    opening = data.draw(
        st.sampled_from(["", "<think>\n", "<|start|>assistant", "<|start|>assistant<|channel|>final<|message|>"])
    )
    markup = markup_of(name, data.draw(st.sampled_from([None, THINK])), opening=opening)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[i:j] for i, j in itertools.pairwise((0, *cuts, len(text)))]
    parts = split(markup, chunks)
    assert "".join(part.text for part in parts) == text
    assert parts == split(markup, [text]) == split(markup, list(text))


def test_a_thought_an_answer_and_calls() -> None:
    call = '<tool_call>\n{"name": "f"}\n</tool_call>'
    assert shown(MARKUP, f"<think>\nplan\n</think>\n\nHello.\n{call}\n{call}") == [
        ("reasoning", "plan"),
        ("answer", "Hello."),
        ("call", f"\n{call}"),
        ("call", call),
    ]


@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "harmony"])
def test_every_reasoning_beside_every_kind_of_call(name: str, thought: str) -> None:
    tags, text = THOUGHTS[thought]
    call = FAMILIES[name].call
    kinds = [("reasoning", "plan")] if tags else []
    found = shown(markup_of(name, tags), text + call)
    assert found == [*kinds, ("call", call.removesuffix("\n</tool_call>") if "without" in name else call)]


@pytest.mark.parametrize(
    ("opening", "text", "expected"),
    [
        ("assistant\n<think>\n", "plan</think>\n\nHi", [("reasoning", "plan"), ("answer", "Hi")]),
        ("assistant\n<think>\n\n</think>\n\n", "Hi", [("answer", "Hi")]),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", "A tag.", [("answer", "A tag.")]),
        ("assistant\n", "<think>plan</think>Hi", [("reasoning", "plan"), ("answer", "Hi")]),
    ],
)
def test_the_end_of_the_prompt_says_how_the_reply_begins(opening: str, text: str, expected: object) -> None:
    assert shown(MARKUP.behind(opening, calls=True), text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "A tag: `<tool_call>` begins a call.",
        "So:\n```xml\n<tool_call>\n{}\n</tool_call>\n```\nDone.",
        "It thinks in <think> and </think>.",
        "  leading and trailing  \n",
        "<tool_cal",
        "a < b, <|im, <thinking> </tool_call>",
    ],
)
def test_what_only_looks_like_a_tag_is_the_answer(text: str) -> None:
    assert shown(MARKUP, text) == [("answer", text)]


def test_a_call_behind_a_code_block_is_one() -> None:
    found = shown(MARKUP, "```\ncode\n```\n<tool_call>x</tool_call>")
    assert found == [("answer", "```\ncode\n```"), ("call", "\n<tool_call>x</tool_call>")]


def test_a_call_within_a_thought_is_thought() -> None:
    text = "<think>maybe <tool_call>x</tool_call></think>no"
    assert shown(MARKUP, text) == [("reasoning", "maybe <tool_call>x</tool_call>"), ("answer", "no")]


def test_no_tools_no_calls() -> None:
    text = "<tool_call>x</tool_call>"
    assert shown(MARKUP.behind("", calls=False), text) == [("answer", text)]


def test_what_breaks_off_stays_what_it_was() -> None:
    assert split(MARKUP, ["<tool_call>{"]) == [Part("call", "<tool_call>{", closed=False)]
    assert shown(MARKUP, "<think>and then </th") == [("reasoning", "and then </th")]


@pytest.mark.parametrize(
    ("markup", "texts", "expected"),
    [
        (MARKUP, ["<tool_call>", "{", "}</too", "l_call> ", "x"], ["<tool_call>", "{", "}", "</tool_call>"]),
        (markup_of("mistral"), ["[TOOL_CALLS]", "f[ARGS]", "{}"], ["[TOOL_CALLS]", "f[ARGS]", "{}"]),
        (
            HARMONY,
            ["<|channel|>x to=f", "<|message|>", "{", "}<|ca", "ll|>"],
            ["<|channel|>x to=f<|message|", ">", "{", "}<|call|>"],
        ),
        (
            HARMONY,
            ["<|channel|>x to=f<|message|>{}", "<|start|>assistant"],
            ["<|channel|>x to=f<|message|>{", "}"],
        ),
    ],
)
def test_a_call_comes_in_parts_of_which_the_last_says_that_it_has_ended(
    markup: Markup, texts: list[str], expected: list[str]
) -> None:
    filter_ = markup.filter()
    parts = [part for text in texts for part in filter_.feed(text) if part.kind == "call"]
    assert [part.text for part in parts] == expected
    ends = bool(markup.harmony or markup.calls[0][1])
    assert [part.closed for part in parts] == [*[False] * (len(parts) - 1), ends]


def test_nothing_waits_for_tags_that_cannot_come() -> None:
    filter_ = Markup(THINK).filter()
    assert [part.text for text in ("Hi", " ", "<", "think>") for part in filter_.feed(text)] == [
        "Hi", " ", "<", "think>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            [("reasoning", "plan"), ("answer", "Hi")],
        ),
        ("<|channel|>commentary<|message|>I look.<|end|>", [("answer", "I look.")]),
        ("no header at all", [("answer", "no header at all")]),
        ("<|channel|>final<|message|>a < b <|x|> c", [("answer", "a < b <|x|> c")]),
        (
            " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
            [("call", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>")],
        ),
        ("<|channel|>fin", []),
    ],
)
def test_harmony(text: str, expected: object) -> None:
    assert shown(HARMONY, text) == expected


def test_harmony_goes_on_where_the_prompt_ends() -> None:
    markup = HARMONY.behind(
        "<|start|>user<|message|>x<|end|><|start|>assistant<|channel|>analysis<|message|>", calls=True
    )
    assert shown(markup, "plan<|end|>") == [("reasoning", "plan")]
