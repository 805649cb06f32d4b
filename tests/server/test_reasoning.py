"""Reasoning through the chat route: told from the answer, counted, switched, bounded."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from tests.replies import HI, answered, script
from tests.serving import CHAT, served, tokens_of
from tests.templates import HARMONY, PLAIN, THINKING, THINKS_ITSELF, checkpoint

pytestmark = pytest.mark.anyio


def reasoning_tokens(whole: dict[str, Any]) -> int:
    tokens: int = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return tokens


async def test_reasoning_is_apart_and_counted(tmp_path: Path) -> None:
    text = "I plan.\n</think>\n\nHello"
    async with served(checkpoint(tmp_path, THINKING), sampler=script(text)) as service:
        choice = await answered(service, HI)
        whole = await service.answer(CHAT, HI)
    assert choice["message"] == {"role": "assistant", "content": "Hello", "reasoning_content": "I plan."}
    assert reasoning_tokens(whole) == len(tokens_of("I plan.\n</think>"))
    assert whole["usage"]["completion_tokens"] == len(tokens_of(text)) + 1


async def test_the_prompt_decides_and_not_the_switch(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, THINKING), sampler=script("Hello</think>")) as service:
        off = await answered(service, HI | {"enable_thinking": False})
        also_off = await answered(service, HI | {"chat_template_kwargs": {"enable_thinking": False}})
        none = await answered(service, HI | {"reasoning_effort": "none"})
        on = await answered(service, HI | {"enable_thinking": True})
    assert off == also_off == none
    assert off["message"] == {"role": "assistant", "content": "Hello</think>"}
    assert on["message"] == {"role": "assistant", "content": "", "reasoning_content": "Hello"}


async def test_a_server_says_what_the_template_gets_where_a_request_does_not(tmp_path: Path) -> None:
    arguments = '{"enable_thinking": false}'
    folder = checkpoint(tmp_path, THINKING)
    async with served(folder, sampler=script("Hello</think>"), chat_template_args=arguments) as service:
        off = await answered(service, HI)
        on = await answered(service, HI | {"enable_thinking": True})
    assert off["message"] == {"role": "assistant", "content": "Hello</think>"}
    assert on["message"] == {"role": "assistant", "content": "", "reasoning_content": "Hello"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ('{"tools": []}', "tools is not anybody's to set"),
        ('{"no_such": 1}', "no_such: the model's chat template does not ask for it"),
    ],
)
async def test_what_no_template_gets_is_refused_at_the_start(tmp_path: Path, given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        async with served(checkpoint(tmp_path, PLAIN), chat_template_args=given):
            pass


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        (PLAIN, {"enable_thinking": True}, "enable_thinking"),
        (PLAIN, {"reasoning_effort": "high"}, "reasoning_effort"),
        (PLAIN, {"thinking_budget": 5}, "thinking_budget"),
        (THINKING, {"reasoning_effort": "low"}, "reasoning_effort"),
        (THINKS_ITSELF, {"enable_thinking": False}, "enable_thinking"),
        (THINKS_ITSELF, {"reasoning_effort": "none"}, "reasoning_effort"),
        (THINKING, {"reasoning_effort": "much"}, "reasoning_effort"),
        (THINKING, {"thinking_budget": -2}, "thinking_budget"),
        (THINKING, {"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        (
            THINKING,
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
        ),
    ],
)
async def test_what_would_not_act_is_refused(
    tmp_path: Path, template: str, fields: dict[str, Any], param: str
) -> None:
    async with served(checkpoint(tmp_path, template)) as service:
        response = await service.post(CHAT, HI | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "fields", [{"enable_thinking": False}, {"reasoning_effort": "none"}, {"thinking_budget": -1}]
)
async def test_who_does_not_think_need_not_be_told(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script("Hello")) as service:
        assert (await answered(service, HI | fields))["message"]["content"] == "Hello"


async def test_effort_reaches_a_template_that_asks_for_it(tmp_path: Path) -> None:
    text = "<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    async with served(checkpoint(tmp_path, HARMONY), sampler=script(text)) as service:
        choice = await answered(service, HI | {"reasoning_effort": "low"})
        prompt = service.engine.language.tokens.decode(service.engine.rows[0].request.prompt)
    assert choice["message"] == {"role": "assistant", "content": "Hello", "reasoning_content": "plan"}
    assert prompt.endswith("Reasoning: low<|start|>assistant")


END = "\n</think>"


@pytest.mark.parametrize("budget", [0, 1, 5, 100])
async def test_a_budget_ends_the_thought(tmp_path: Path, budget: int) -> None:
    thought = "a thought without an end"
    texts = {0: thought[:budget] + END + "Hi", 100: f"{thought} and more"}
    # The script goes on by the place of the token: what is forced takes the place of what it says there.
    script_ = script((thought * 3)[:budget] + "?" * len(END) + "Hi") if budget < 100 else script(texts[100])
    async with served(checkpoint(tmp_path, THINKING), sampler=script_) as service:
        choice = await answered(service, HI | {"thinking_budget": budget})
        whole = await service.answer(CHAT, HI | {"thinking_budget": budget})
    if budget == 100:
        assert choice["message"]["reasoning_content"] == texts[100]
    else:
        assert choice["message"]["content"] == "Hi"
        assert choice["message"].get("reasoning_content", "") == thought[:budget].rstrip()
        assert reasoning_tokens(whole) == budget + len(tokens_of("\n</think>"))


async def test_a_budget_in_a_batch_is_a_budget_alone(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, THINKING)
    bodies = [
        HI | {"seed": seed, "temperature": 1, "max_tokens": 40, "ignore_eos": True, "thinking_budget": budget}
        for seed, budget in enumerate((3, 0, 17, -1))
    ]
    async with served(folder, no_prompt_cache=True) as service:
        alone = [(await service.answer(CHAT, body))["choices"] for body in bodies]
        together = await asyncio.gather(*(service.answer(CHAT, body) for body in bodies))
    assert [whole["choices"] for whole in together] == alone
    async with served(folder, no_prompt_cache=True, lookahead=True) as service:
        ahead = await asyncio.gather(*(service.answer(CHAT, body) for body in bodies))
    assert [whole["choices"] for whole in ahead] == alone


async def test_a_budget_outlives_a_preemption(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, THINKING)
    bodies = [
        HI | {"seed": seed, "temperature": 1, "max_tokens": 30, "ignore_eos": True, "thinking_budget": 4 * seed}
        for seed in range(4)
    ]
    async with served(folder, no_prompt_cache=True) as service:
        alone = [(await service.answer(CHAT, body))["choices"] for body in bodies]
    async with served(folder, no_prompt_cache=True, ctx_size=80) as service:
        together = await asyncio.gather(*(service.answer(CHAT, body) for body in bodies))
        assert any(row.num_preempted for row in service.engine.rows)
    assert [whole["choices"] for whole in together] == alone


async def test_what_a_template_does_not_ask_for_is_refused_wherever_it_is_said(tiny: Path) -> None:
    """A switch that is off is what a model without thoughts does anyway."""
    async with served(tiny) as service:
        for arguments in ({"enable_thinking": True}, {"reasoning_effort": "high"}, {"foo": 1}):
            refused = await service.client.post(CHAT, json=HI | {"chat_template_kwargs": arguments})
            assert refused.status_code == 400, arguments
            assert next(iter(arguments)) in refused.json()["error"]["param"]
        off = await service.client.post(
            CHAT, json=HI | {"max_tokens": 3, "chat_template_kwargs": {"enable_thinking": False}}
        )
        assert off.status_code == 200
