"""Case 56: where the template rewrites history, all before the end of the last user turn but one is reused."""

import json
from pathlib import Path

import pytest

from tests.serving import CHAT, ScriptedSampler, served, tokens_of
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.anyio

TURN = "<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
PLAIN, WITHOUT_THOUGHT = "m.content", "m.content.split('</think>')[-1]"
TEMPLATES = {
    "tokens of the generation prompt alone": (PLAIN, "<|im_start|>assistant\n<answer>"),
    "reasoning dropped from history": (WITHOUT_THOUGHT, "<|im_start|>assistant\n"),
    "an empty think block": (PLAIN, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
}
ANSWER = "<think>it is simple</think>An answer."


@pytest.mark.parametrize("kind", TEMPLATES)
async def test_the_prompt_is_reused_to_the_end_of_the_previous_user_turn(tmp_path: Path, kind: str) -> None:
    content, opening = TEMPLATES[kind]
    folder = write_checkpoint(tmp_path, "gemma3_text")
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said["chat_template"] = (
        LOOP.replace("CONTENT", content) + "{% if add_generation_prompt %}" + opening + "{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    script = ScriptedSampler({seed: tokens_of(ANSWER) for seed in range(4)})
    async with served(folder, sampler=script) as service:
        messages: list[dict[str, str]] = []
        ends = 0
        for turn in range(4):
            messages.append({"role": "user", "content": f"Question {turn} of a longer conversation."})
            answer = await service.answer(CHAT, {"messages": messages, "seed": turn})
            assert answer["timings"]["cache_n"] >= ends // 16 * 16
            ends = answer["usage"]["prompt_tokens"] - len(tokens_of(opening))
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        assert answer["timings"]["cache_n"] > 100
