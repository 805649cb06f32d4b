import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from mlx.utils import tree_flatten
from mlx_lm import stream_generate
from mlx_lm.models import mixtral
from mlx_lm.utils import load_model

from engine.errors import ModelError, ModelIncomplete, UnsupportedModel
from engine.model import placement as placing
from engine.model.gguf import import_gguf
from engine.model.load import load
from engine.model.memory import human_bytes
from engine.request import Sampling
from tests.engine.model.tiny_gguf import TOKENS, weights, write_gguf
from tests.zoo import write_zoo

GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a tiny checkpoint folder; keyword arguments edit its JSON files, None deletes a field."""

    def make(kind: Kind = Kind.F32, **files: dict[str, Any]) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        import_gguf(write_gguf(tmp_path / "m.gguf", kind=lambda _: kind), folder)
        for name, edits in files.items():
            path = folder / f"{name}.json"
            said = json.loads(path.read_text()) | edits
            path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
        return folder

    return make


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([[5, 9, 200, 9, 77]])).astype(mx.float32))


def dtypes(model: Any) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


def test_packed_weights_are_expanded_on_a_cpu_to_the_very_values(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(Kind.Q4_1)
    loaded = load(folder)
    assert dtypes(loaded.model) == {mx.float32}
    assert loaded.weight_bytes == sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    size = human_bytes(loaded.weight_bytes)
    assert loaded.notes == (f"weights: 4-bit, expanded to float32 ({size}): no quantized CPU kernel here",)
    expected = quants.dequantize(quants.quantize(weights()["blk.0.ffn_up.weight"], Kind.Q4_1), Kind.Q4_1)
    np.testing.assert_array_equal(np.array(loaded.model.model.layers[0].mlp.up_proj.weight), expected)
    packed, _ = load_model(folder)
    np.testing.assert_allclose(logits(loaded.model), logits(packed), atol=1e-5)


def test_packed_weights_stay_where_float32_does_not_fit(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "available_bytes", lambda: 100_000)
    loaded = load(checkpoint(Kind.Q4_1))
    assert isinstance(loaded.model.model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert loaded.notes == ("weights: 4-bit (60 kB), slow: float32 would take 315 kB of 100 kB free",)


@pytest.fixture
def half_experts(tmp_path: Path) -> Path:
    """A mixture of experts with bfloat16 weights."""
    folder = write_zoo(tmp_path / "mixtral", "mixtral")
    file = str(folder / "model.safetensors")
    halves = {name: array.astype(mx.bfloat16) for name, array in mx.load(file).items()}
    mx.save_safetensors(file, halves, metadata={"format": "mlx"})
    return folder


def test_experts_in_half_precision_are_widened_on_a_cpu_which_knows_no_other_way(half_experts: Path) -> None:
    loaded = load(half_experts)
    assert dtypes(loaded.model) == {mx.float32}
    assert loaded.notes[0].endswith(", widened: a CPU multiplies experts in float32 alone")
    assert np.isfinite(logits(loaded.model)).all()


def test_experts_that_do_not_fit_widened_are_refused(half_experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_bytes = (half_experts / "model.safetensors").stat().st_size
    monkeypatch.setattr(placing, "available_bytes", lambda: 2 * half_bytes)
    with pytest.raises(ModelError, match="experts run in float32 alone on a CPU"):
        load(half_experts)


def test_weights_that_fit_nowhere_are_refused_before_they_are_read(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "available_bytes", lambda: 1000)
    with pytest.raises(ModelError, match="60 kB and 1 kB of memory are free"):
        load(checkpoint(Kind.Q4_1))


def test_packed_weights_stay_on_a_device_that_has_kernels(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing.mx, "default_device", lambda: mx.Device(mx.gpu))
    loaded = load(checkpoint(Kind.Q8_0))
    assert isinstance(loaded.model.model.embed_tokens, nn.QuantizedEmbedding)
    assert loaded.notes == ("weights: 8-bit (99 kB)",)


def test_plain_weights_stay_as_they_are(checkpoint: Callable[..., Path]) -> None:
    loaded = load(checkpoint(Kind.BF16))
    assert dtypes(loaded.model) == {mx.bfloat16, mx.float32}
    assert loaded.notes[0].startswith("weights: bfloat16 and float32 (")


def test_half_precision_scales_are_widened_before_they_multiply(tmp_path: Path) -> None:
    arguments = {
        "model_type": "mixtral", "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2,
    }  # fmt: skip
    model = mixtral.Model(mixtral.ModelArgs.from_dict(arguments))
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=32, bits=4)
    import_gguf(write_gguf(tmp_path / "m.gguf"), tmp_path)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    said = arguments | {"quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    loaded = load(tmp_path)
    assert dtypes(loaded.model) == {mx.float32}
    experts = model.model.layers[0].block_sparse_moe.switch_mlp.up_proj
    scales, biases = experts.scales.astype(mx.float32), experts.biases.astype(mx.float32)
    expected = mx.dequantize(experts.weight, scales, biases, group_size=32, bits=4)
    unpacked = loaded.model.model.layers[0].block_sparse_moe.switch_mlp.up_proj.weight
    np.testing.assert_array_equal(np.array(unpacked), np.array(expected))
    np.testing.assert_allclose(logits(loaded.model), logits(model), atol=0.05)


TEMPLATE_ENDS = {
    "plain text": ("{{ messages[-1]['content'] }}", {2}),
    "closes with one": ("Q: {{ messages[0]['content'] }} A: {{ messages[-1]['content'] }}<|im_start|>\n", {2, 1}),
    "then ends the text": ("Q {{ messages[-1]['content'] }}<|im_start|>\n<|endoftext|>", {2, 1}),
    "closes with markup": ("Q {{ messages[-1]['content'] }}<|im_start|>message<|endoftext|>", {2, 0}),
    "raises": ("{{ raise_exception('no') }}", {2}),
    "is broken": ("{% if %}", {2}),
    "leaves the answer out": ("<|im_start|>{{ messages[0]['content'] }}", {2}),
}


@pytest.mark.parametrize(("template", "ends"), TEMPLATE_ENDS.values(), ids=TEMPLATE_ENDS)
def test_what_the_template_closes_a_turn_with_ends_an_answer(
    checkpoint: Callable[..., Path], template: str, ends: set[int]
) -> None:
    assert load(checkpoint(tokenizer_config={"chat_template": template})).eos_token_ids == ends


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ends"),
    [
        (None, None, None, set()),
        (7, None, None, {7}),
        ([7, 8], None, None, {7, 8}),
        (7, 8, None, {7, 8}),
        (7, [8, 9], "<|endoftext|>", {7, 8, 9, 0}),
        (None, [], "<|im_end|>", {2}),
        (None, [7, "x", True, -1], None, {7}),
    ],
)
def test_end_of_sequence_ids_are_united(
    checkpoint: Callable[..., Path], config: Any, generation: Any, tokenizer: Any, ends: set[int]
) -> None:
    folder = checkpoint(
        config={"eos_token_id": config},
        generation_config={"eos_token_id": generation},
        tokenizer_config={"chat_template": None, "eos_token": tokenizer},
    )
    assert load(folder).eos_token_ids == ends


@pytest.mark.parametrize(
    ("said", "sampling"),
    [
        ({}, None),
        ({"do_sample": True}, None),
        ({"do_sample": False, "temperature": 0.7}, GREEDY),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1}, Sampling(0.6, 20, 0.9, 0.1)),
        ({"do_sample": True, "top_p": 0.9}, Sampling(1.0, 0, 0.9)),
        ({"temperature": 0}, GREEDY),
        ({"temperature": "hot", "top_k": -1}, None),
    ],
)
def test_sampling_is_the_checkpoints_own(
    checkpoint: Callable[..., Path], said: dict[str, Any], sampling: Sampling | None
) -> None:
    assert load(checkpoint(generation_config=said)).sampling == sampling


@pytest.mark.parametrize(
    ("said", "context_length"),
    [
        ({"n_ctx": 99}, 99),
        ({"max_position_embeddings": 7, "n_ctx": 99}, 7),
        ({"text_config": {"max_position_embeddings": 5}}, 5),
        ({"max_seq_len": True}, 4096),
        ({}, 4096),
    ],
)
def test_the_context_length_is_found_or_assumed_aloud(
    checkpoint: Callable[..., Path], said: dict[str, Any], context_length: int
) -> None:
    loaded = load(checkpoint(config={"max_position_embeddings": None, **said}))
    assert loaded.context_length == context_length
    assert any("4096 tokens are assumed" in note for note in loaded.notes) == (context_length == 4096)
    assert loaded.vocab_size == len(TOKENS)


def test_a_template_file_replaces_the_checkpoints_own(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("say {{ messages[0]['content'] }}")
    loaded = load(checkpoint(tokenizer_config={"chat_template": None}), chat_template=file)
    assert loaded.tokenizer.has_chat_template
    message = [{"role": "user", "content": "hi"}]
    assert loaded.tokenizer.apply_chat_template(message, tokenize=False) == "say hi"
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path / "checkpoint", chat_template=tmp_path / "gone.jinja")
    file.write_text("{% if %}")
    with pytest.raises(ModelError, match="wrong in line 1"):
        load(tmp_path / "checkpoint", chat_template=file)


@pytest.mark.parametrize(
    "said",
    [{"top_k": float("inf")}, {"temperature": 1e9}, {"min_p": 5}, {"top_p": 7}, {"repetition_penalty": 0}],
    ids=str,
)
def test_sampling_out_of_bounds_is_named(checkpoint: Callable[..., Path], said: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: " + next(iter(said))):
        load(checkpoint(generation_config=said))


def test_without_a_template_there_is_none(checkpoint: Callable[..., Path]) -> None:
    loaded = load(checkpoint(tokenizer_config={"chat_template": None}))
    assert not loaded.tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("config", "kind", "said"),
    [
        ({"model_type": "klingon"}, UnsupportedModel, "klingon"),
        ({"model_type": None}, ModelError, "model_type"),
        ({"model_type": "cache"}, ModelError, "Model"),
        ({"hidden_size": None}, ModelError, "hidden_size"),
        ({"hidden_size": 32}, ModelError, "shape"),
        ({"num_hidden_layers": 3}, ModelError, "parameters"),
        ({"num_hidden_layers": 1}, ModelError, "parameters"),
    ],
)
def test_what_cannot_be_loaded_is_a_model_error(
    checkpoint: Callable[..., Path], config: dict[str, Any], kind: type[ModelError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        load(checkpoint(config=config))


def test_unreadable_files_are_model_errors(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json holds no JSON object"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelIncomplete, match=r"model\.safetensors is missing"):
        load(folder)


@pytest.mark.real
def test_the_built_in_model_knows_the_capital_of_france(real_checkpoint: Path) -> None:
    loaded = load(real_checkpoint)
    assert (loaded.context_length, loaded.vocab_size, loaded.eos_token_ids) == (8192, 49152, {2})
    assert "4- and 8-bit, expanded to float32 (538 MB)" in loaded.notes[0] or mx.default_device() != mx.Device(
        mx.cpu
    )
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = "".join(
        piece.text for piece in stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=16)
    )
    assert answer == "The capital of France is Paris."


@pytest.mark.real
def test_the_built_in_base_model_boils_water(real_base_checkpoint: Path) -> None:
    loaded = load(real_base_checkpoint)
    assert (loaded.context_length, loaded.vocab_size, loaded.eos_token_ids) == (32768, 262144, {1})
    assert not loaded.tokenizer.has_chat_template
    assert loaded.tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    prompt = loaded.tokenizer.encode("Water boils at")
    answer = "".join(
        response.text for response in stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=6)
    )
    assert answer == " 100 degrees Celsius."[: len(answer)]
    assert "100" in answer
