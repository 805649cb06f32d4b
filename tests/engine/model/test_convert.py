"""What a conversion writes is what mlx-lm would write, whole or not at all, and no worse than was asked."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from mlx_lm.convert import convert as convert_by_mlx_lm

from engine.errors import ConfigError, ModelError, ModelIncomplete, UnsupportedModel, UntrustedCode
from engine.model import convert as converting
from engine.model.conversion import BITS, DTYPES, GROUP_SIZES, MIXTURES, Conversion
from engine.model.convert import KIND, NO_GROUPS, Converted, Left, convert
from engine.model.load import load
from engine.model.store import Store, check_complete
from tests.engine.model.hub_double import Hub, point_the_library_at, serving
from tests.engine.model.tiny_gguf import write_gguf
from tests.tiny import write_checkpoint
from tests.zoo import write_zoo

UNMEASURED = {"measures": False}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A llama with tied heads whose rows are whole groups of 128."""
    return write_checkpoint(tmp_path / "tiny", hidden_size=128, intermediate_size=256, head_dim=32)


def arrays(folder: Path) -> dict[str, mx.array]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in mx.load(str(file)).items()}


def same(ours: dict[str, mx.array], theirs: dict[str, mx.array]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and mx.array_equal(ours[name], theirs[name]) for name in ours
    )


def said(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def by_mlx_lm(source: Path, folder: Path, **how: Any) -> Path:
    """What `mlx_lm.convert` makes of the checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    convert_by_mlx_lm(str(source), str(folder), quantize=True, **how)
    return folder


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("bits", BITS)
def test_every_width_is_what_mlx_lm_writes(bits: int, source: Path, store: Store, tmp_path: Path) -> None:
    for group_size in GROUP_SIZES:
        asked = Conversion(bits=bits, group_size=group_size, max_loss=2.0)
        done = convert(str(source), asked, output=tmp_path / f"{group_size}", store=store)
        theirs = by_mlx_lm(source, tmp_path / "theirs", q_bits=bits, q_group_size=group_size)
        assert same(arrays(done.path), arrays(theirs))
        assert said(done.path) == said(theirs)
        assert (done.num_packed, done.left, done.was_packed) == (15, (), "")
        assert done.loss is not None
        assert done.loss < 2
    model, tokenizer = mlx_lm.load(str(done.path))
    assert model.model.layers[0].mlp.up_proj.bits == bits
    assert tokenizer.has_chat_template


@pytest.mark.parametrize("recipe", MIXTURES)
def test_recipes_are_mlx_lms(recipe: str, source: Path, store: Store, tmp_path: Path) -> None:
    done = convert(str(source), Conversion(mixed=recipe, max_loss=9), store=store)
    assert done.name == f"local/tiny-mixed-{recipe}"
    theirs = by_mlx_lm(source, tmp_path / "theirs", quant_predicate=f"mixed_{recipe}", q_group_size=64)
    assert same(arrays(done.path), arrays(theirs))
    assert said(done.path) == said(theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_type_is_that_of_scales_and_norms(dtype: str, source: Path, store: Store, tmp_path: Path) -> None:
    done = convert(str(source), Conversion(dtype=dtype, **UNMEASURED), store=store)
    assert done.dtypes == (dtype,)
    assert same(arrays(done.path), arrays(by_mlx_lm(source, tmp_path / "theirs", dtype=dtype, q_group_size=64)))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "mamba2", "gpt_oss", "gemma3"])
def test_families_load_here_and_in_mlx_lm(family: str, store: Store, tmp_path: Path) -> None:
    source = write_zoo(tmp_path / "source", family)
    done = convert(str(source), Conversion(bits=8, group_size=32), store=store)
    ours = arrays(done.path)
    assert done.num_packed == sum(name.endswith(".scales") for name in ours) > 0
    model, _ = mlx_lm.utils.load_model(done.path)
    assert len(ours) == len(tree_flatten(model.parameters()))
    assert load(done.path).weight_bytes > 0


def test_experts_are_quantized_and_their_routers_as_the_family_wants(store: Store, tmp_path: Path) -> None:
    source = write_zoo(tmp_path / "source", "qwen3_moe")
    done = convert(str(source), Conversion(group_size=32, **UNMEASURED), store=store)
    assert any(".switch_mlp." in name and name.endswith(".scales") for name in arrays(done.path))
    left = {(left.layer.rpartition(".mlp.")[2], left.why) for left in done.left}
    assert ("gate", NO_GROUPS) in left, "its family wants routers in groups of 64"


def test_layers_whose_rows_are_no_whole_groups_stay_and_are_named(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny", hidden_size=128, intermediate_size=96, head_dim=32)
    done = convert(str(source), Conversion(**UNMEASURED), store=store)
    assert set(done.left) == {Left(f"model.layers.{number}.mlp.down_proj", NO_GROUPS) for number in range(2)}
    before, after = arrays(source), arrays(done.path)
    for left in done.left:
        assert mx.array_equal(before[f"{left.layer}.weight"], after[f"{left.layer}.weight"])
    assert load(done.path).weight_bytes > 0


def test_a_model_without_whole_groups_is_refused(tiny: Path, store: Store) -> None:
    with pytest.raises(UnsupportedModel, match="whole groups of 128") as caught:
        convert(str(tiny), Conversion(group_size=128), store=store)
    assert "--group-size 32" in caught.value.hint
    assert store.list() == []


@pytest.mark.parametrize("bits", [*BITS, None])
def test_from_gguf(bits: int | None, store: Store, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "some model.gguf", kind=lambda name: Kind.Q4_1)
    done = convert(str(file), Conversion(bits=bits, max_loss=9), store=store)
    assert done.name == f"gguf/some-model-{f'{bits}bit' if bits else 'dequantized'}"
    assert done.was_packed == "4-bit affine, groups of 32"
    assert done.dtypes == ("bfloat16",)
    assert {left.layer.rpartition(".")[2] for left in done.left} == ({"down_proj"} if bits else set())
    assert ("quantization" in said(done.path)) == (bits is not None)
    assert said(done.path)["torch_dtype"] == "bfloat16"
    assert mlx_lm.load(str(done.path))
    before = arrays(done.source)
    packed = [before[f"model.embed_tokens.{part}"] for part in ("weight", "scales", "biases")]
    if bits is None:
        values = mx.dequantize(*packed, 32, 4).astype(mx.bfloat16)
        assert mx.array_equal(arrays(done.path)["model.embed_tokens.weight"], values)


def test_layers_of_a_kind_that_cannot_be_dequantized_stay_as_they_are(store: Store, tmp_path: Path) -> None:
    source = write_zoo(tmp_path / "source", "deepseek_v3", kv_lora_rank=32)
    convert(str(source), Conversion(bits=8, group_size=32, **UNMEASURED), name="eight", store=store)
    done = convert("eight", Conversion(group_size=32), name="four", store=store)
    kept = {left.layer for left in done.left if left.why == KIND}
    assert {layer.rpartition(".")[2] for layer in kept} == {"unembed_out"}
    model, _ = mlx_lm.utils.load_model(done.path)
    assert {module.bits for name, module in model.named_modules() if name in kept} == {8}
    with pytest.raises(UnsupportedModel, match=r"cannot be dequantized: .*unembed_out"):
        convert("eight", Conversion(bits=None), store=store)


def test_from_the_hub(store: Store, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub({"someone/tiny": [{file.name: file.read_bytes() for file in source.iterdir()}]})
    with serving(hub):
        point_the_library_at(hub, monkeypatch, str(tmp_path / "cache"))
        done = convert("someone/tiny", Conversion(**UNMEASURED), store=store)
    assert [entry.name for entry in store.list()] == ["someone/tiny", "someone/tiny-4bit"]
    assert store.list()[1].source == "someone/tiny, 4 bits, groups of 64"
    assert (done.name, done.path) == ("someone/tiny-4bit", store.models / "someone" / "tiny-4bit")
    again = convert("someone/tiny-4bit", Conversion(bits=8, **UNMEASURED), store=store)
    assert (again.name, again.was_packed) == ("someone/tiny-4bit-8bit", "4-bit affine, groups of 64")


def test_what_lies_beside_the_weights_goes_along(source: Path, store: Store) -> None:
    beside = ("generation_config.json", "chat_template.jinja", "LICENSE", "NOTICE.txt", "README.md", "merges.txt")
    others = ("evil.py", "pytorch_model.bin", ".identities.json", "model.safetensors.index.json", "x.gguf")
    for name in (*beside, *others):
        (source / name).write_text('{"weight_map": {"a": "model.safetensors"}}' if "index" in name else "{}")
    done = convert(str(source), Conversion(**UNMEASURED), store=store)
    known = {"config.json", "model.safetensors", "model.safetensors.index.json", ".mlxcel.json"}
    kept = {"tokenizer.json", "tokenizer_config.json", *beside}
    assert {path.name for path in done.path.iterdir()} == known | kept
    for name in kept:
        assert (done.path / name).read_bytes() == (source / name).read_bytes()


def test_several_files_where_one_would_be_too_large(
    source: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(str(source), Conversion(**UNMEASURED), store=store)
    names = list(arrays(whole.path))
    monkeypatch.setattr(converting, "make_shards", lambda weights: [{n: weights[n]} for n in weights])
    done = convert(str(source), Conversion(**UNMEASURED), name="parts", store=store)
    assert len(list(done.path.glob("model-*-of-*.safetensors"))) == len(names)
    assert same(arrays(done.path), arrays(whole.path))
    check_complete(done.path)
    assert mlx_lm.load(str(done.path))


def test_memory_holds_one_array_and_not_the_model(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path / "tiny", hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=12
    )
    total = sum(array.nbytes for array in arrays(source).values())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    done = convert(str(source), Conversion(**UNMEASURED), store=store)
    assert mx.get_peak_memory() - before < total / 8
    assert mx.get_active_memory() - before < total / 100
    mx.reset_peak_memory()
    converting.perplexity(done.path)
    assert mx.get_active_memory() - before < total / 100


def test_progress_counts_the_bytes_of_the_weights(source: Path, store: Store) -> None:
    told: list[tuple[str, int, int | None]] = []
    convert(str(source), Conversion(), store=store, progress=lambda *stage: told.append(stage))
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == ["measure", "convert"]
    counted = [(done, total) for stage, done, total in told if stage == "convert"]
    assert counted == sorted(counted)
    assert counted[-1][0] == counted[-1][1]


def test_nothing_is_printed(source: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    convert(str(source), Conversion(), store=store)
    assert capsys.readouterr() == ("", "")


def test_dequantized_and_quantized_again_it_is_the_same(source: Path, store: Store) -> None:
    small = convert(str(source), Conversion(bits=8, group_size=32, **UNMEASURED), store=store)
    plain = convert("tiny-8bit", Conversion(bits=None, dtype="float32"), name="plain", store=store)
    assert plain.loss == pytest.approx(1, abs=1e-3)
    assert "quantization" not in said(plain.path)
    assert not any(name.endswith(".scales") for name in arrays(plain.path))
    again = convert("plain", Conversion(bits=8, group_size=32, **UNMEASURED), name="again", store=store)
    assert again.num_packed == small.num_packed


def test_what_would_change_nothing_is_refused(source: Path, store: Store) -> None:
    convert(str(source), Conversion(**UNMEASURED), store=store)
    with pytest.raises(ModelError, match="quantized so already: 4 bits, groups of 64"):
        convert("tiny-4bit", Conversion(), name="other", store=store)
    with pytest.raises(ModelError, match="no other type is asked for"):
        convert(str(source), Conversion(bits=None), store=store)
    assert [entry.name for entry in store.list()] == ["local/tiny-4bit"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"bits": 7}, "quantized to 2, 3, 4, 5, 6 or 8 bits, not 7"),
        ({"bits": 1}, "not 1"),
        ({"group_size": 16}, "groups of 32, 64 or 128, not 16"),
        ({"dtype": "int8"}, "bfloat16, float16 or float32, not int8"),
        ({"mixed": "5_6"}, "2_6, 3_4, 3_6 or 4_6, not 5_6"),
        ({"max_loss": 0.0}, "above 0"),
        ({"max_loss": float("nan")}, "above 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Conversion(**asked)
    assert caught.value.setting in asked


@pytest.mark.parametrize(
    ("asked", "most"),
    [({}, 1.5), ({"bits": 8}, 1.5), ({"bits": 3}, 3), ({"bits": 2}, 10), ({"mixed": "2_6"}, 10),
     ({"bits": None}, 1.5), ({"bits": 2, "max_loss": 1.1}, 1.1)],
)  # fmt: skip
def test_how_much_worse_is_a_success(asked: dict[str, Any], most: float) -> None:
    assert Conversion(**asked).most_loss == most


def test_a_name_that_exists_is_refused_unless_it_is_replaced(source: Path, store: Store) -> None:
    first = convert(str(source), Conversion(**UNMEASURED), store=store)
    for reference, name in (
        (str(source), None),
        ("nobody/knows", "tiny-4bit"),
        ("nobody/knows", "local/tiny-4bit"),
    ):
        with pytest.raises(ModelError, match="local/tiny-4bit is in the store already"):
            convert(reference, Conversion(), name=name, store=store)
    asked = Conversion(dtype="float16", **UNMEASURED)
    assert convert(str(source), asked, replaces=True, store=store).path == first.path
    assert arrays(first.path)["model.norm.weight"].dtype == mx.float16
    for name in ("smollm2-135m", "mlxcel/gemma3-270m", "../x", "a/b/c", ".x"):
        with pytest.raises(ModelError, match="name"):
            convert(str(source), Conversion(), name=name, store=store)
    with pytest.raises(ModelError, match="own place"):
        convert("tiny-4bit", Conversion(bits=8), name="tiny-4bit", replaces=True, store=store)


def test_a_bare_name_that_means_another_model_is_refused_even_to_replace(source: Path, store: Store) -> None:
    with store.begin("mlx-community/tiny-4bit") as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    with pytest.raises(ModelError, match="mlx-community/tiny-4bit is in the store already"):
        convert(str(source), Conversion(), name="tiny-4bit", replaces=True, store=store)


def test_into_a_folder(source: Path, store: Store, tmp_path: Path) -> None:
    output = tmp_path / "made" / "here"
    done = convert(str(source), Conversion(**UNMEASURED), output=output, store=store)
    assert (done.name, done.path) == (None, output)
    assert store.list() == []
    check_complete(output)
    assert leftovers(output.parent) == ["here"]
    assert not (output / ".mlxcel.json").exists()
    with pytest.raises(ModelError, match="is there already"):
        convert(str(source), Conversion(**UNMEASURED), output=output, store=store)
    (output / "kept").mkdir()
    with pytest.raises(ModelError, match="more than a checkpoint"):
        convert(str(source), Conversion(**UNMEASURED), output=output, replaces=True, store=store)
    (output / "kept").rmdir()
    convert(str(source), Conversion(bits=8, **UNMEASURED), output=output, replaces=True, store=store)
    assert said(output)["quantization"]["bits"] == 8
    (tmp_path / "empty").mkdir()
    convert(str(source), Conversion(**UNMEASURED), output=tmp_path / "empty", store=store)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "will.txt").touch()
    with pytest.raises(ModelIncomplete):
        convert(str(source), Conversion(**UNMEASURED), output=tmp_path / "papers", replaces=True, store=store)
    assert leftovers(tmp_path / "papers") == ["will.txt"]


def test_a_home_that_cannot_be_written_is_named_and_not_the_folder(
    source: Path, store: Store, tmp_path: Path
) -> None:
    store.home.mkdir(exist_ok=True)
    (store.home / "locks").touch()
    with pytest.raises(ModelError, match=f"^the store at {store.home} cannot be written"):
        convert(str(source), Conversion(**UNMEASURED), output=tmp_path / "out", store=store)


def test_a_result_that_is_worse_than_asked_is_not_kept(source: Path, store: Store) -> None:
    with pytest.raises(ModelError, match=r"times the source's .* more than 0.5 times is no success") as caught:
        convert(str(source), Conversion(max_loss=0.5), store=store)
    assert "--max-loss 1" in caught.value.hint
    assert store.list() == []
    assert leftovers(store.models / "local") == []


def test_a_result_that_is_no_number_is_not_kept(source: Path, store: Store) -> None:
    weights = arrays(source)
    weights["model.layers.1.post_attention_layernorm.weight"] *= 1e6  # beyond float16
    mx.save_safetensors(str(source / "model.safetensors"), weights, metadata={"format": "mlx"})
    with pytest.raises(ModelError, match=r"the result's perplexity is (nan|inf)"):
        convert(str(source), Conversion(dtype="float16"), store=store)
    assert leftovers(store.models / "local") == []
    assert convert(str(source), Conversion(dtype="float16", **UNMEASURED), store=store).loss is None


def test_a_damaged_source_is_named(source: Path, store: Store) -> None:
    weights = arrays(source)
    weights["model.layers.0.mlp.up_proj.weight"] *= float("nan")
    mx.save_safetensors(str(source / "model.safetensors"), weights, metadata={"format": "mlx"})
    with pytest.raises(ModelError, match="is nan: its weights are damaged") as caught:
        convert(str(source), Conversion(), store=store)
    assert "--no-check" in caught.value.hint
    assert store.list() == []


def test_code_of_a_checkpoint_is_refused_and_goes_along_when_it_is_trusted(source: Path, store: Store) -> None:
    marker = source / "marker"
    (source / "evil.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nfrom mlx_lm.models.llama import Model, ModelArgs\n"
    )
    (source / "config.json").write_text(json.dumps(said(source) | {"model_file": "evil.py"}))
    with pytest.raises(UntrustedCode):
        convert(str(source), Conversion(), store=store)
    assert not marker.exists()
    done = convert(str(source), Conversion(trust_remote_code=True), store=store)
    assert marker.exists()
    assert (done.path / "evil.py").exists()
    with pytest.raises(UntrustedCode):
        load(done.path)


def test_a_disk_with_too_little_room_is_said_before(
    source: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(source))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(ModelError, match=r"the weights will take \d+ kB, and 1 kB are free"):
        convert(str(source), Conversion(**UNMEASURED), store=store)
    assert leftovers(store.models / "local") == []


def test_a_disk_that_fills_up_leaves_nothing(source: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written = iter(range(5))
    content = converting._content

    def full(array: mx.array) -> memoryview:
        if next(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return content(array)

    monkeypatch.setattr(converting, "_content", full)
    for where in ({"store": store}, {"store": store, "output": store.home / "out"}):
        written = iter(range(5))
        with pytest.raises(ModelError, match="No space left on device"):
            convert(str(source), Conversion(**UNMEASURED), **where)
    assert leftovers(store.models / "local") == []
    assert leftovers(store.home) == ["locks", "models"]


def test_weights_that_go_away_meanwhile_are_said(
    source: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = converting._copy_beside

    def cut(*where: Any, **how: Any) -> None:
        copy(*where, **how)
        os.truncate(source / "model.safetensors", 1000)

    monkeypatch.setattr(converting, "_copy_beside", cut)
    with pytest.raises(ModelError, match="cannot be read"):
        convert(str(source), Conversion(**UNMEASURED), store=store)
    assert leftovers(store.models / "local") == []


KILLED = """
import os, signal, sys
from pathlib import Path
from engine.model.conversion import Conversion
from engine.model.convert import convert
from engine.model.store import Store

def end(stage, done, total):
    if stage == "convert" and done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

output = Path(sys.argv[3]) if len(sys.argv) > 3 else None
convert(sys.argv[1], Conversion(measures=False), output=output, store=Store(Path(sys.argv[2])), progress=end)
"""


@pytest.mark.parametrize("outside", [False, True])
def test_a_kill_in_the_middle_leaves_no_model_and_the_next_attempt_clears_up(
    outside: bool, source: Path, store: Store, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "model" if outside else None
    folder = output.parent if output else store.models / "local"
    arguments = [str(source), str(store.home), *([str(output)] if output else [])]
    ended = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert store.list() == []
    [left] = leftovers(folder)
    assert left.endswith(".partial")
    done: Converted = convert(str(source), Conversion(**UNMEASURED), output=output, store=store)
    assert leftovers(folder) == [done.path.name]
    check_complete(done.path)
