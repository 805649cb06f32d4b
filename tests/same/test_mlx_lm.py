"""Greedy tokens equal mlx-lm's own generation, on the same weights in float32 and the same prompt."""

from pathlib import Path

import pytest
from mlx_lm import stream_generate

from engine.config import EngineConfig
from engine.direct import DirectEngine
from engine.engine import Engine
from engine.model.load import load
from engine.request import Request


def both(path: Path, question: str, *, chat: bool, num_new: int) -> tuple[list[int], list[int]]:
    """Tokens of our engine with its kernels, and of mlx-lm with its own operations."""
    loaded = load(path)
    engine = Engine.open(EngineConfig(model=path, cache_dtype="float32"))
    text = engine.language.template.render([{"role": "user", "content": question}]) if chat else question
    prompt = engine.language.tokens.encode(text, not chat)
    request = Request("r", tuple(prompt), max_tokens=num_new)
    ours = [output.token for output in DirectEngine(engine).complete(request)]
    theirs = stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=num_new)
    return ours, [response.token for response in theirs]


@pytest.mark.real
def test_48_greedy_tokens_of_a_chat_answer(real_checkpoint):
    ours, theirs = both(real_checkpoint, "Tell me a story about a fox.", chat=True, num_new=48)
    assert len(ours) == 48
    assert ours == theirs


@pytest.mark.real
def test_greedy_tokens_of_a_base_model_with_sliding_windows(real_base_checkpoint):
    ours, theirs = both(real_base_checkpoint, "Once upon a time", chat=False, num_new=8)
    assert len(ours) == 8
    assert ours == theirs
