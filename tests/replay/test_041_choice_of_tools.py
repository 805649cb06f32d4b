"""Case 41: a call that is required comes, whatever the model would say; one that is not to be never does."""

from pathlib import Path
from typing import Any

import pytest

from engine.text.channels import CALLED, CHANNEL, END, MESSAGE, START
from tests.replies import ADD, CALL, HI, NO_BLANKS, SUB, answered, called, script
from tests.serving import CHAT, ScriptedSampler, served
from tests.templates import CODER, HARMONY, PLAIN, THINKING, THINKS_ITSELF, checkpoint
from tests.tiny import byte_tokenizer

pytestmark = pytest.mark.anyio

CHANNELS = (START, CHANNEL, MESSAGE, END, CALLED, "<|constrain|>", "<|return|>")
TEMPLATES = {"plain": PLAIN, "coder": CODER, "thinking": THINKING, "thinks": THINKS_ITSELF, "harmony": HARMONY}
UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
FORCED: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": UNIT}} for name in ("heat", "cool")
]
COMPOUND = (
    f"{CHANNEL}analysis{MESSAGE}plan{END}{START}assistant"
    f'{CHANNEL}commentary to=functions.add <|constrain|>json{MESSAGE}{{"a": 2}}{CALLED}'
)


def written(folder: Path, name: str) -> Path:
    return checkpoint(folder, TEMPLATES[name], CHANNELS if name == "harmony" else ())


def in_channels(text: str) -> ScriptedSampler:
    return ScriptedSampler({0: byte_tokenizer(CHANNELS).encode(text).ids})


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"heat", "cool"}), ({"type": "function", "function": {"name": "cool"}}, {"cool"})],
)
async def test_a_model_of_prose_calls(tmp_path: Path, name: str, choice: Any, names: set[str]) -> None:
    """Random weights, which know of no tool."""
    body = HI | {"tools": FORCED, "tool_choice": choice, "max_tokens": 300, "parallel_tool_calls": False}
    body |= {"logit_bias": NO_BLANKS}
    if name in ("thinking", "thinks"):
        body |= {"thinking_budget": 4}
    if name == "harmony":  # so that a thought, which may go on for ever, is soon over
        body |= {"logit_bias": NO_BLANKS | {str(byte_tokenizer(CHANNELS).token_to_id(END)): 12}}
    async with served(written(tmp_path, name)) as service:
        for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 1}, {"temperature": 1, "seed": 2}):
            answer = await answered(service, body | sampling)
            [(called_name, arguments)] = called(answer)
            assert called_name in names
            assert arguments in ({"unit": "c"}, {"unit": "f"})
            assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)


@pytest.mark.parametrize("budget", [0, 1, 4, 40])
async def test_a_thought_in_channels_has_a_budget_and_a_call_follows(tmp_path: Path, budget: int) -> None:
    """The model has a thought to begin with, and the end that its budget puts to it leaves room for the call."""
    opens = {"logit_bias": NO_BLANKS | {str(byte_tokenizer(CHANNELS).token_to_id(CHANNEL)): 14}}
    asked = {"tools": FORCED, "tool_choice": "required", "max_tokens": 300, "thinking_budget": budget}
    num_thoughts = 0
    async with served(written(tmp_path, "harmony")) as service:
        for seed in range(3):
            body = HI | asked | opens | {"temperature": 1, "seed": seed}
            answer = await answered(service, body)
            [(name, arguments)] = called(answer)
            assert name in ("heat", "cool")
            assert arguments in ({"unit": "c"}, {"unit": "f"})
            num_thoughts += bool(answer["message"].get("reasoning_content"))
            counted = (await service.answer(CHAT, body))["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert counted <= budget + 5  # what begins and ends it, and the rest of a character
    assert num_thoughts > 0 or budget < 2


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "add"}}])
async def test_a_thought_and_a_call_in_channels(tmp_path: Path, choice: Any) -> None:
    async with served(written(tmp_path, "harmony"), sampler=in_channels(COMPOUND)) as service:
        answer = await answered(service, HI | {"tools": [ADD, SUB], "tool_choice": choice})
    assert called(answer) == [("add", {"a": 2})]
    assert answer["message"]["reasoning_content"] == "plan"
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)


@pytest.mark.parametrize(
    ("name", "text"), [("plain", CALL), ("thinking", f"</think>{CALL}"), ("harmony", COMPOUND)]
)
async def test_with_none_there_is_no_call(tmp_path: Path, name: str, text: str) -> None:
    sampler = in_channels(text) if name == "harmony" else script(text)
    async with served(written(tmp_path, name), sampler=sampler) as service:
        answer = await answered(service, HI | {"tools": [ADD, SUB], "tool_choice": "none"})
    assert "tool_calls" not in answer["message"]
    assert '"a": 2' in answer["message"]["content"]
    assert answer["finish_reason"] == "stop"
