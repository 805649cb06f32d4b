"""Which models split how, and why others do not, without any rank."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from engine.errors import ConfigError, UnsupportedModel
from engine.model.load import load
from engine.model.placement import place
from engine.model.split import Split, split_of
from tests.tiny import write_checkpoint
from tests.zoo import ZOO, zoo_config, zoo_model

PAGE = Path(__file__).parents[3] / "docs" / "ranks.md"


def split(family: str, num_ranks: int = 2, wanted: str = "auto", **overrides: object) -> Split:
    return split_of(zoo_model(family, **overrides), zoo_config(family) | overrides, num_ranks, wanted)


@pytest.mark.parametrize(
    ("family", "wanted", "kind"),
    [
        ("llama", "auto", "tensor"),
        ("qwen3", "tensor", "tensor"),
        ("qwen3_moe", "auto", "tensor"),
        ("qwen3_moe", "pipeline", "pipeline"),
        ("deepseek_v3", "auto", "tensor"),
        ("qwen3_next", "auto", "pipeline"),
        ("qwen3_moe, packed", "auto", "pipeline"),
    ],
)
def test_a_model_is_split_as_it_can_be(family, wanted, kind):
    found = split(family, wanted=wanted)
    assert (found.kind, found.num_ranks, found.in_turn) == (kind, 2, kind == "pipeline")
    assert found.family in found.note


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            "num_attention_heads is 3, num_key_value_heads is 1",
        ),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, which 2 does not divide"),
        ({"intermediate_size": 49}, "intermediate_size is 49, which 2 does not divide"),
        ({"hidden_size": 33, "head_dim": 11, "num_attention_heads": 3}, "num_attention_heads is 3"),
    ],
)
def test_what_does_not_divide_is_named(overrides, reason):
    with pytest.raises(UnsupportedModel, match=f"llama cannot be split over 2 ranks .*{reason}"):
        split("llama", **overrides)
    with pytest.raises(ConfigError, match=f"llama has no tensor split over 2 ranks: .*{reason}"):
        split("llama", wanted="tensor", **overrides)


class _Second:
    """Stands for a group of two, of which this process is the second."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def test_a_rank_never_holds_the_whole_model(tmp_path):
    folder = write_checkpoint(tmp_path, "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    whole_bytes = (folder / "model.safetensors").stat().st_size
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    part = load(folder, split=lambda model: Split("tensor", 2, "llama").apply(model, _Second()))
    assert part.weight_bytes < 0.6 * whole_bytes
    assert mx.get_peak_memory() - before < 0.7 * whole_bytes


def test_packed_layers_of_a_rank_are_expanded_as_whole_ones_are():
    model = zoo_model("qwen3_moe, packed", moe_intermediate_size=64, hidden_size=128, head_dim=32)
    model.shard(_Second())
    packed = {name for name, layer in model.named_modules() if "scales" in layer}
    assert "model.layers.0.self_attn.o_proj" in packed
    assert "expanded to float32" in place(model)
    assert not {name for name, layer in model.named_modules() if "scales" in layer}


def test_a_family_that_does_neither_is_named():
    with pytest.raises(UnsupportedModel, match=r"gemma2 cannot .* does not shard; pipeline: .* does not pipeline"):
        split("gemma2")


def test_a_hint_names_what_can_be():
    with pytest.raises(ConfigError, match="qwen3 has no pipeline split over 2 ranks: its mlx-lm class") as refused:
        split("qwen3", wanted="pipeline")
    assert refused.value.hint == "--split tensor can be"


def test_more_ranks_than_layers_are_no_pipeline():
    with pytest.raises(ConfigError, match="it has 2 layers"):
        split("qwen3_moe", 4, "pipeline")


def test_the_page_lists_the_families_that_split():
    listed = re.findall(r"^\| (\w+) \| (yes|no) \| (yes|no) \|", PAGE.read_text(), re.MULTILINE)
    assert {name: (tensor, pipeline) for name, tensor, pipeline in listed} == {
        name: ("yes" if hasattr(model, "shard") else "no", "yes" if hasattr(inner, "pipeline") else "no")
        for name in ZOO
        if "," not in name
        for model in [zoo_model(name)]
        for inner in [getattr(model, "model", None)]
        if hasattr(model, "shard") or hasattr(inner, "pipeline")
    }
