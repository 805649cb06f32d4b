"""What cannot cross ranks is off, and refused where it was asked for."""

from pathlib import Path

import pytest

from engine.config import EngineConfig, Ranks
from engine.errors import ConfigError
from engine.ranks.settings import over_ranks
from engine.size import Size

RANKS = Ranks(0, 2, "127.0.0.1")


def test_what_knows_one_process_is_off():
    config = over_ranks(EngineConfig(model=Path("m"), ranks=RANKS, decode_storage_backend="dense", parallel=3))
    assert config.no_prompt_cache
    assert config.portable
    assert config.lookahead is False
    assert config.decode_storage_backend == "dense"
    assert (config.parallel, config.ranks) == (3, RANKS)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("draft_model", Path("d")),
        ("draft_kind", "prompt-lookup"),
        ("verify_cache", 0.5),
        ("lookahead", True),
        ("threads", 2),
        ("decode_storage_backend", "paged"),
        ("adapter", Path("a")),
        ("prompt_cache_bytes", Size("1GiB")),
        ("prompt_cache_ttl", 5),
    ],
)
def test_what_was_asked_for_and_would_be_off_is_refused_by_name(setting, value):
    with pytest.raises(ConfigError, match=f"^{setting} has no use over several ranks") as refused:
        over_ranks(EngineConfig(model=Path("m"), ranks=RANKS, **{setting: value}))
    assert refused.value.setting == setting


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_one_process_has_nothing_to_split(split):
    with pytest.raises(ConfigError, match=f"split {split} is for several ranks") as refused:
        EngineConfig(model=Path("m"), split=split)
    assert "mlx.launch" in refused.value.hint
    assert EngineConfig(model=Path("m"), split=split, ranks=RANKS).split == split
