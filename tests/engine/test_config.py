"""The engine's bounds: each is held, and the setting is named."""

import math
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.request import Loops


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
        ("kv_admission_watermark", 0.6),
        ("loop_detection", "maybe"),
        ("loop_detection", "1,20"),
        ("loop_detection", "3,2,12"),
        ("loop_detection", "1,20,1"),
        ("draft_kind", "guess"),
        ("draft_block_size", 0),
        ("draft_block_size", 7),
        ("prompt_lookup_max_batch", 2),
    ],
)
def test_a_setting_out_of_bounds_is_named(tmp_path, setting, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model=tmp_path, **{setting: value})
    assert caught.value.setting == setting


def test_loops_are_looked_for_where_that_is_said(tmp_path):
    def loops(said):
        return EngineConfig(model=tmp_path, loop_detection=said).loops

    assert EngineConfig(model=tmp_path).loops is None
    assert (loops("off"), loops("on"), loops("2,3,4")) == (None, Loops(1, 20, 12), Loops(2, 3, 4))


def test_one_at_a_time_and_several_at_once_contradict(tmp_path):
    with pytest.raises(ConfigError, match="no_batch"):
        EngineConfig(model=tmp_path, no_batch=True, parallel=2)


@pytest.mark.parametrize(
    ("settings", "num_slots", "slot", "shared"),
    [
        ({}, 4, 1000, None),
        ({"ctx_size": 100}, 4, 100, 100),
        ({"ctx_size": 100}, 1, 100, None),
        ({"ctx_size": 100, "parallel": 4}, 4, 25, None),
        ({"parallel": 3}, 3, 333, None),
        ({"ctx_size": 100, "parallel": 4, "kv_unified": True}, 4, 100, 100),
        ({"parallel": 4, "kv_unified": True}, 4, 1000, None),
        ({"ctx_size": 100, "kv_unified": False}, 4, 25, None),
        ({"ctx_size": 100, "kv_unified": False}, 1, 100, None),
    ],
)
def test_rows_share_a_context_or_have_their_parts(tmp_path, settings, num_slots, slot, shared):
    config = EngineConfig(model=tmp_path, **settings)
    assert (config.slot_context(1000, num_slots), config.shared_context(num_slots)) == (slot, shared)


def test_a_context_with_less_than_a_token_for_each_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="3 tokens cannot be split over 4"):
        EngineConfig(model=tmp_path, ctx_size=3, parallel=4).slot_context(1000, 4)


@pytest.mark.parametrize(
    ("settings", "drafting"),
    [
        ({}, "none"),
        ({"draft_kind": "prompt-lookup", "draft_block_size": 3, "prompt_lookup_max_batch": 1}, "prompt-lookup"),
        ({"draft_model": Path("small"), "draft_block_size": 3}, "draft"),
        ({"draft_model": Path("small"), "draft_kind": "draft"}, "draft"),
        ({"draft_kind": "draft"}, None),
        ({"draft_model": Path("small"), "draft_kind": "prompt-lookup"}, None),
        ({"draft_model": Path("small"), "prompt_lookup_max_batch": 1}, None),
    ],
)
def test_who_drafts(tmp_path, settings, drafting):
    if drafting is None:
        with pytest.raises(ConfigError, match=r"draft_kind|draft_model"):
            EngineConfig(model=tmp_path, **settings)
    else:
        assert EngineConfig(model=tmp_path, **settings).drafting == drafting
