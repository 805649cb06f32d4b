"""Speculation was accepted at the start and failed at the first request, or answered differently once a window was
full. Here it is refused at the start, by name, or the answers are those of plain decoding.
"""

import pytest

from engine.errors import ConfigError
from tests.engines import Guesses, Watched, drive
from tests.zoo import ZOO, zoo_loaded, zoo_model


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_greedy_answers_past_the_window(name):
    watched = Watched(zoo_loaded(zoo_model(name)), mode=ZOO[name].mode, draft_kind="prompt-lookup")
    request = watched.request("long", 20, 120)
    alone = watched.alone(request)
    guesses = Guesses({"long": alone})
    assert drive(watched.engine, [request], drafts=guesses)[0] == [alone]
    assert guesses.num_accepted > 20
    assert drive(watched.engine, [request])[0] == [alone]


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "mamba2", "falcon_h1", "deepseek_v3"])
def test_state_that_cannot_go_back_is_refused_at_the_start(name):
    with pytest.raises(ConfigError, match=f"this model decodes in the mode {ZOO[name].mode.split(',')[0]}"):
        Watched(zoo_loaded(zoo_model(name)), mode=ZOO[name].mode, draft_kind="prompt-lookup")
