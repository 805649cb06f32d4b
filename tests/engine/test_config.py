"""The engine's bounds: each is held, and the setting is named."""

import math

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ctx_size", -1),
        ("n_predict", 0),
        ("n_predict", -2),
        ("parallel", 0),
        ("max_queue_depth", -1),
        ("prefill_grant_interval", 0),
        ("max_batch_prefill", 0),
        ("max_batch_prefill_tokens", -1),
        ("mixed_step", -1),
        ("temp", -0.1),
        ("temp", math.nan),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", math.inf),
        ("repeat_penalty", 0.0),
        ("seed", -1),
        ("cache_dtype", "float8"),
    ],
)
def test_a_setting_out_of_bounds_is_named(tmp_path, setting, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model=tmp_path, **{setting: value})
    assert caught.value.setting == setting


def test_one_at_a_time_and_several_at_once_contradict(tmp_path):
    with pytest.raises(ConfigError, match="no_batch"):
        EngineConfig(model=tmp_path, no_batch=True, parallel=2)
