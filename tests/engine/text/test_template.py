"""The chat render: what dialects allow, templates need not know."""

import pytest

from engine.errors import NoChatTemplate, RequestError, TemplateFailed
from engine.text.template import ChatTemplate, begun_by


def rendered(messages, source="{{ tools }}", **options):
    """What reaches the template engine."""
    seen = {}

    def apply(turns, **arguments):
        seen.update(turns=turns, **arguments)
        return "".join(turn["content"] for turn in turns)

    ChatTemplate(apply, source).render(messages, **options)
    return seen


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_null_content_is_empty_text():
    assert rendered([{"role": "assistant", "content": None}])["turns"] == [{"role": "assistant", "content": ""}]


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered([{"role": "user", "content": parts}])["turns"][0]["content"] == "ab"


def test_developer_is_system():
    assert rendered([{"role": "developer", "content": "x"}])["turns"][0]["role"] == "system"


SYSTEMS = [("system", "a"), ("developer", "b"), ("user", "hi"), ("assistant", "x"), ("system", "c"), ("user", "y")]
MERGED = [("user", "hi"), ("assistant", "x"), ("user", "c\n\ny")]


@pytest.mark.parametrize(
    ("takes", "expected"),
    [
        (lambda roles: True, [("system", "b") if role == "developer" else (role, text) for role, text in SYSTEMS]),
        (lambda roles: "system" not in roles[1:], [("system", "a\n\nb"), *MERGED]),
        (lambda roles: "system" not in roles, [("user", "a\n\nb\n\nhi"), *MERGED[1:]]),
    ],
)
@pytest.mark.parametrize("drops", [False, True])
def test_system_turns_are_where_the_template_has_a_place_for_them(takes, expected, drops):
    seen = []

    def apply(turns, **arguments):
        roles = [turn["role"] for turn in turns]
        if not takes(roles):
            if drops:
                return turns[-1]["content"]
            raise ValueError("no such role")
        seen.append([(turn["role"], turn["content"]) for turn in turns])
        return "".join(turn["content"] for turn in turns)

    ChatTemplate(apply, "{{ tools }}").render([{"role": role, "content": text} for role, text in SYSTEMS])
    assert seen[-1] == expected


def test_a_users_own_turns_stay_apart():
    turns = [{"role": role, "content": "x"} for role in ("system", "user", "user")]
    assert rendered(turns)["turns"] == turns


def test_arguments_of_a_call_are_an_object():
    turn = rendered([{"role": "assistant", "content": None, "tool_calls": [CALL]}])["turns"][0]
    assert turn["tool_calls"][0]["function"]["arguments"] == {"a": 2}


def test_arguments_that_are_not_json_name_their_message():
    broken = {"function": {"name": "add", "arguments": "{"}}
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls") as caught:
        rendered([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [broken]}])
    assert caught.value.param == "messages[1].tool_calls"


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, '{"a": "\\ud800"}', "5", "null", "[]", 5, [1]])
def test_arguments_that_are_no_object_name_their_message(arguments):
    call = {"function": {"name": "add", "arguments": arguments}}
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls"):
        rendered([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "function", [{"name": "add"}, {"name": "add", "arguments": None}, {"name": "add", "arguments": ""}]
)
def test_arguments_that_are_not_given_are_an_empty_object(function):
    turn = rendered([{"role": "assistant", "tool_calls": [{"function": function}]}])["turns"][0]
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_tools_and_arguments_reach_a_template_that_knows_them():
    seen = rendered([{"role": "user", "content": "x"}], tools=[TOOL], arguments={"enable_thinking": False})
    assert seen["tools"] == [TOOL]
    assert seen["enable_thinking"] is False


def test_a_template_without_tools_gets_them_in_words():
    messages = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    turns = rendered(messages, source="{{ messages }}", tools=[TOOL])["turns"]
    assert turns[0]["content"].startswith("Be terse.\n\nYou can call these functions:")
    assert '"name": "add"' in turns[0]["content"]
    assert turns[2]["content"] == '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert turns[3] == {"role": "user", "content": "<tool_response>\n5\n</tool_response>"}


def test_a_base_model_has_no_template():
    assert not ChatTemplate(None).exists
    with pytest.raises(NoChatTemplate, match="base model"):
        ChatTemplate(None).render([{"role": "user", "content": "x"}])


def test_a_template_that_refuses_is_the_requests_fault():
    def apply(turns, **arguments):
        raise ValueError("roles must alternate")

    with pytest.raises(TemplateFailed, match="roles must alternate"):
        ChatTemplate(apply).render([{"role": "user", "content": "x"}])


def plainly(turns, add_generation_prompt=True, **_):
    """A template whose text grows by its end alone, but that refuses to begin with a system message by itself."""
    if [turn["role"] for turn in turns] == ["system"]:
        raise ValueError("there is no user")
    text = "".join(f"[{turn['role']}:{turn['content']}]" for turn in turns)
    return text + "[assistant:" * add_generation_prompt


CONVERSATION = [
    {"role": role, "content": text}
    for role, text in (("system", "s"), ("user", "one"), ("assistant", "two"), ("user", "three"))
]


def test_turns_begin_where_longer_conversations_have_them_too():
    template = ChatTemplate(plainly)
    before = ()
    for stop in (2, 4):
        prompt = template.render(CONVERSATION[:stop])
        lengths = template.boundaries(CONVERSATION[:stop], prompt, str)
        assert lengths[: len(before)] == before
        before = lengths
    texts = [prompt[:length] for length in lengths]
    user, assistant = "[system:s][user:one]", "[assistant:two]"
    assert texts == [f"{user}[assistant:", user + assistant, f"{user}{assistant}[user:three][assistant:"]


def test_a_turn_that_is_rewritten_begins_nowhere():
    def forgetful(turns, add_generation_prompt=True, **_):
        return plainly(turns[-1:], add_generation_prompt)

    template = ChatTemplate(forgetful)
    prompt = template.render(CONVERSATION)
    assert template.boundaries(CONVERSATION, prompt, str) == (len(prompt),)


@pytest.mark.parametrize("apply", [plainly, lambda turns, **_: f"{turns[-1]['content'].strip()}<end>"])
@pytest.mark.parametrize("text", ["two", " two", "two ", "<think>two"])
def test_a_prompt_ends_with_the_text_that_it_goes_on_from(apply, text):
    turns = [*CONVERSATION[:2], {"role": "assistant", "content": [{"type": "text", "text": text}]}]
    prompt = ChatTemplate(apply).render(turns, continues=True)
    assert prompt.endswith(text.lstrip())
    assert apply is not plainly or prompt == f"[system:s][user:one][assistant:{text}"
    assert begun_by(turns[-1]) == text.lstrip()


@pytest.mark.parametrize(
    "show", [lambda text: "", lambda text: text.upper(), lambda text: text * 2, lambda text: text.split("t")[-1]]
)
def test_a_text_that_a_template_does_not_show_is_refused(show):
    def apply(turns, **_):
        return "".join(show(turn["content"]) for turn in turns)

    with pytest.raises(RequestError, match="last message") as refused:
        ChatTemplate(apply).render(CONVERSATION[:3], continues=True)
    assert refused.value.param == "messages"


def test_which_message_a_text_breaks_off_in():
    template = ChatTemplate(plainly)
    prompt = template.render(CONVERSATION)
    at = {0: None, prompt.index("one"): None, prompt.index("two"): 2, prompt.index("three]") + 5: 3}
    for length, message in at.items():
        assert template.message_at(CONVERSATION, prompt[:length]) == message
    assert template.message_at(CONVERSATION[1:], "[user:o") == 0
    assert template.message_at(CONVERSATION, prompt) is None
    assert template.message_at(CONVERSATION, "something else") is None
