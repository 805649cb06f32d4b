"""Greedy tokens equal mlx-lm's own generation, on the same weights in float32 and the same rendered prompt."""

import pytest
from mlx_lm import stream_generate

from engine.config import EngineConfig
from engine.direct import DirectEngine
from engine.engine import Engine
from engine.model.load import load
from engine.request import Request


@pytest.mark.real
def test_48_greedy_tokens_of_a_chat_answer(real_checkpoint):
    loaded = load(real_checkpoint)
    engine = Engine.open(EngineConfig(model=real_checkpoint))
    text = engine.template.render([{"role": "user", "content": "Tell me a story about a fox."}])
    prompt = engine.tokens.encode(text, False)
    ours = [output.token for output in DirectEngine(engine).complete(Request("r", tuple(prompt), max_tokens=48))]
    theirs = [
        response.token for response in stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=48)
    ]
    assert len(ours) == 48
    assert ours == theirs
