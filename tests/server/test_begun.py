"""An answer that the conversation has begun goes on from there, in every dialect that has a way to say so."""

import string
from pathlib import Path
from typing import Any

import pytest

from tests.replies import CALL, HI, TOOLS, answered, called, script
from tests.serving import CHAT, MESSAGES, Served, served, tokens_of
from tests.templates import FORGETS, HARMONY, NO_SYSTEM, PLAIN, THINKING, THINKS_ITSELF, checkpoint
from tests.tiny import TEMPLATE, VOCAB_SIZE, write_checkpoint

pytestmark = pytest.mark.anyio

GO_ON = {"continue_final_message": True, "add_generation_prompt": False}
QWEN3 = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}",
).replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n\n</think>\n\n{%")
TEMPLATES = {
    "plain": TEMPLATE,
    "calls": PLAIN,
    "trims": PLAIN.replace("m.content }}", "m.content | trim }}"),
    "opens thoughts": THINKING,
    "thinks itself": THINKS_ITSELF,
    "empty thoughts": QWEN3,
    "forgets": FORGETS,
    "no system": NO_SYSTEM,
    "no tools": TEMPLATE.replace("tools", "nothing"),
    "harmony": HARMONY,
}


def begun(text: Any, **more: Any) -> dict[str, Any]:
    return HI | {"messages": [*HI["messages"], {"role": "assistant", "content": text, **more}]}


def prompt_of(service: Served) -> str:
    """The last prompt that was asked about."""
    *_, row = (row for row in service.engine.rows if row.request.id != "next-turn")
    return str(service.engine.language.tokens.decode(row.request.prompt))


@pytest.mark.parametrize("name", TEMPLATES)
async def test_the_prompt_ends_with_the_text_and_the_answer_is_what_is_new(tmp_path: Path, name: str) -> None:
    text = "Once upon"
    async with served(checkpoint(tmp_path, TEMPLATES[name]), sampler=script(" a <think>time"), seed=0) as service:
        choice = await answered(service, begun(text) | GO_ON)
        prompt = prompt_of(service)
        assert prompt.endswith(text)
        assert prompt.count("assistant") == 1
        assert choice["message"] == {"role": "assistant", "content": " a <think>time"}
        body = {"messages": begun(text)["messages"], "max_tokens": 50}
        message = await service.answer(MESSAGES, body)
        assert prompt_of(service) == prompt
        assert message["content"] == [{"type": "text", "text": " a <think>time"}]
        stream = await service.stream(MESSAGES, body)
        assert "".join(e["delta"].get("text", "") for e in stream.chunks if "delta" in e) == " a <think>time"
        del body["max_tokens"]
        counted = await service.answer(f"{MESSAGES}/count_tokens", body)
        assert counted == {"input_tokens": len(tokens_of(prompt))}
        template = await service.answer("/apply-template", {"messages": begun(text)["messages"], **GO_ON})
        assert template == {"prompt": prompt}


async def test_a_thought_that_is_open_goes_on(tmp_path: Path) -> None:
    sampler = script(" it.\n</think>\n\nSo.")
    for number, template in enumerate((THINKING, THINKS_ITSELF)):
        async with served(checkpoint(tmp_path / str(number), template), sampler=sampler, seed=0) as service:
            asked = begun("<think>\nI plan") | GO_ON
            choice = await answered(service, asked)
            bounded = await service.answer(CHAT, asked | {"thinking_budget": 2, "max_tokens": 20})
        assert choice["message"] == {"role": "assistant", "content": "So.", "reasoning_content": " it."}
        assert bounded["usage"]["completion_tokens_details"]["reasoning_tokens"] < 20


async def test_what_was_thought_stays_before_the_text(tmp_path: Path) -> None:
    blocks = [{"type": "thinking", "thinking": "I plan.", "signature": ""}, {"type": "text", "text": "So"}]
    async with served(checkpoint(tmp_path, THINKING), sampler=script(" be it."), seed=0) as service:
        await service.answer(MESSAGES, begun(blocks) | {"max_tokens": 50, "seed": None})
        assert prompt_of(service).endswith("<think>\nI plan.\n</think>\n\nSo")


async def test_calls_behind_the_text_are_calls(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(f"!\n{CALL}")) as service:
        choice = await answered(service, TOOLS | begun("I add") | GO_ON)
        half = await service.post(CHAT, TOOLS | begun(f"I add {CALL[:30]}") | GO_ON)
    assert called(choice) == [("add", {"a": 2})]
    assert choice["message"]["content"] == "!"
    assert (half.status_code, half.json()["error"]["param"]) == (400, "messages")


async def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Its thought is put back, what it has read is reused, and the next turn has all of it."""
    whole = "I plan.\n</think>\n\nThis is a long answer that has an end."
    cut = len("I plan.\n</think>\n\nThis is a long")
    sampler = script(whole, whole[cut:], "Yes")
    async with served(checkpoint(tmp_path, THINKING), sampler=sampler, no_warmup_next_turn=False) as service:
        first = (await service.answer(CHAT, HI | {"max_tokens": cut}))["choices"][0]
        assert (first["finish_reason"], first["message"]["content"]) == ("length", "This is a long")
        text = first["message"]["content"]
        second = await service.answer(CHAT, begun(text) | GO_ON | {"seed": 1})
        assert prompt_of(service).endswith("<think>\n" + whole[:cut])
        num_cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert num_cached >= len(tokens_of(prompt_of(service))) - 16
        text += second["choices"][0]["message"]["content"]
        await service.warmed_up()
        messages = [*begun(text)["messages"], {"role": "user", "content": "Sure?"}]
        third = await service.answer(CHAT, HI | {"messages": messages, "seed": 2})
        prompt = prompt_of(service)
    assert f"<think>\n{whole}<|im_end|>" in prompt
    reusable = len(tokens_of(prompt[: prompt.index("Sure?")])) // 16 * 16
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == reusable


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2"])
async def test_it_goes_on_with_what_it_would_have_said(tmp_path: Path, family: str) -> None:
    """Also where a prompt is cut at the turns that it has."""
    folder = write_checkpoint(tmp_path, family)
    letters = {tokens_of(letter)[0] for letter in string.ascii_letters}
    bans = {str(token): -100 for token in range(VOCAB_SIZE) if token not in letters}
    asked = HI | {"temperature": 0, "logit_bias": bans}
    async with served(folder) as service:
        whole = (await service.answer(CHAT, asked | {"max_tokens": 40}))["choices"][0]["message"]["content"]
        for cut in (1, 24):
            body = asked | begun(whole[:cut]) | GO_ON | {"max_tokens": 40 - cut}
            for more in ({}, {"cache_prompt": False}):
                rest = await service.answer(CHAT, body | more)
                assert whole[:cut] + rest["choices"][0]["message"]["content"] == whole
    assert set(whole) <= set(string.ascii_letters)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (begun("So") | {"continue_final_message": True}, "continue_final_message"),
        (begun("So") | {"add_generation_prompt": False}, "continue_final_message"),
        (HI | GO_ON, "continue_final_message"),
        (begun(None) | GO_ON, "continue_final_message"),
        (begun("So", tool_calls=[{"function": {"name": "add"}}]) | GO_ON, "continue_final_message"),
        (TOOLS | begun("So") | GO_ON | {"tool_choice": "required"}, "tool_choice"),
        (
            TOOLS | begun("So") | GO_ON | {"tool_choice": {"type": "function", "function": {"name": "add"}}},
            "tool_choice",
        ),
        (begun("So") | GO_ON | {"response_format": {"type": "json_object"}}, "continue_final_message"),
        (begun("<think>I plan</think>So") | GO_ON, "messages"),
    ],
)
async def test_what_cannot_go_on_is_refused_by_name(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with served(checkpoint(tmp_path, FORGETS)) as service:
        response = await service.post(CHAT, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert not service.engine.rows


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"messages": begun("So ")["messages"]}, "messages[1]"),
        ({"messages": begun([{"type": "text", "text": "So\n"}])["messages"]}, "messages[1]"),
        ({"messages": begun([{"type": "thinking", "thinking": "So"}])["messages"]}, "messages[1]"),
        (
            {"messages": begun([{"type": "tool_use", "id": "c", "name": "add", "input": {}}])["messages"]},
            "messages[1]",
        ),
        ({"messages": begun("<think>I plan</think>So")["messages"]}, "messages"),
        (
            {
                "messages": begun("So")["messages"],
                "tools": [{"name": "add", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "any"},
            },
            "tool_choice",
        ),
    ],
)
async def test_what_cannot_go_on_is_refused_in_messages(tmp_path: Path, more: dict[str, Any], named: str) -> None:
    async with served(checkpoint(tmp_path, FORGETS)) as service:
        for path, bound in ((MESSAGES, {"max_tokens": 5}), (f"{MESSAGES}/count_tokens", {})):
            response = await service.post(path, more | bound)
            assert response.status_code == 400
            assert response.json()["error"]["message"].startswith(named)


async def test_an_empty_beginning_is_none(tiny: Path) -> None:
    async with served(tiny, sampler=script("Yes"), seed=0) as service:
        prompts = []
        for empty in ("", None, [], [{"type": "text", "text": ""}]):
            await service.answer(MESSAGES, {"messages": begun(empty)["messages"], "max_tokens": 5})
            prompts.append(prompt_of(service))
        await service.answer(MESSAGES, {"messages": HI["messages"], "max_tokens": 5})
        assert set(prompts) == {prompt_of(service)}
