"""A GGUF file, read once and written again as an MLX checkpoint folder.

Quantized tensors become MLX's packed form, most of them without changing a number (`packing.py`); F16, BF16 and
F32 tensors are copied. Every other kind is refused by name. Scales take 8 bytes per 32 weights in place of 2 to 4:
the price of exactness.

It knows the file format and the names of tensors; vocabularies are read in `vocabulary.py`. No MLX here.
"""

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from engine.errors import ModelIncomplete, UnsupportedModel
from engine.model.packing import BITS, GROUP_SIZE, pack
from engine.model.safetensors import head
from engine.model.vocabulary import write_tokenizer

Progress = Callable[[str, int, int | None], None]
Array = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
PIECE_BYTES = 1 << 22

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

PLAIN = {Kind.F32: "F32", Kind.F16: "F16", Kind.BF16: "BF16"}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FREQS = "rope_freqs.weight"
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class Family:
    """How one GGUF architecture becomes an mlx-lm model: its type, its layers' names, what was rearranged."""

    model_type: str
    architecture: str
    layer_names: dict[str, str]
    permuted: bool = False
    norm_plus_one: bool = False


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", LAYER_NAMES, permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", LAYER_NAMES),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", LAYER_NAMES | QK_NORM_NAMES),
    "gemma3": Family(
        "gemma3_text", "Gemma3ForCausalLM", LAYER_NAMES | QK_NORM_NAMES | GEMMA_NAMES, norm_plus_one=True
    ),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's place in the file. `shape` is in row-major order; the data starts at byte `offset`."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class GGUFFile:
    """The metadata and the tensor table of a GGUF file, with the data mapped and not read.

    Raises UnsupportedModel for what is no GGUF of a known version, ModelIncomplete for what is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size < 24:
            raise ModelIncomplete(f"{path} is cut short: {path.stat().st_size} bytes are no GGUF file")
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._view = memoryview(self._bytes.data)
        self._at = 0
        try:
            self.metadata, self.tensors = self._read()
        except (struct.error, EOFError) as error:
            raise ModelIncomplete(f"{path} is cut short: it ends within its header") from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise UnsupportedModel(f"{path} is damaged: {error}") from error
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise UnsupportedModel(f"{path} is damaged: it names a tensor twice")
        for tensor in self.tensors:
            if tensor.offset + tensor.size_bytes > len(self._bytes):
                raise ModelIncomplete(f"{path} is cut short: it ends before the end of {tensor.name}")

    def rows(self, tensor: Tensor) -> Array:
        """The tensor's bytes as `[rows, bytes per row]`, still mapped."""
        data = self._bytes[tensor.offset : tensor.offset + tensor.size_bytes]
        return data.reshape(-1, tensor.size_bytes * tensor.shape[-1] // int(np.prod(tensor.shape)))

    def _read(self) -> tuple[dict[str, Any], list[Tensor]]:
        if bytes(self._view[:4]) != MAGIC:
            raise UnsupportedModel(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            raise UnsupportedModel(f"{self.path} is GGUF version {version}; versions 2 and 3 are read here")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_fields):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        heads = [self._tensor_head() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES))
        if alignment <= 0:
            raise ValueError(f"its alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        return metadata, [
            Tensor(name, kind, shape, start + offset, _size_bytes(name, kind, shape))
            for name, kind, shape, offset in heads
        ]

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._view, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        return str(self._take(self._scalar("Q")), encoding="utf-8")

    def _take(self, size: int) -> memoryview:
        if self._at + size > len(self._view):
            raise EOFError
        taken = self._view[self._at : self._at + size]
        self._at += size
        return taken

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if code := SCALARS.get(item):
                return np.frombuffer(self._take(count * struct.calcsize(code)), dtype=f"<{code}").tolist()
            return [self._value(item) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"a field has the unknown type {kind}")
        return self._scalar(SCALARS[kind])

    def _tensor_head(self) -> tuple[str, Kind, tuple[int, ...], int]:
        name = self._string()
        dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
        code, offset = self._scalar("I"), self._scalar("Q")
        if code not in set(Kind):
            raise UnsupportedModel(f"{self.path}: {name} is of the unknown tensor kind {code}")
        return name, Kind(code), tuple(reversed(dimensions)), offset


def import_gguf(source: Path, destination: Path, *, progress: Progress = lambda *_: None) -> None:
    """Write the checkpoint folder `destination` (which exists) from the GGUF file `source`.

    Memory does not grow with the tensors. Raises UnsupportedModel naming the architecture, tensor kind, rope
    scaling or tokenizer that cannot be taken over, and ModelIncomplete for a file that is cut short.
    """
    file = GGUFFile(source)
    try:
        _import(file, destination, progress)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        # A damaged file can hold a value of any type where a number or a name belongs.
        raise UnsupportedModel(f"{source} is damaged: {error}") from error


def _import(file: GGUFFile, destination: Path, progress: Progress) -> None:
    architecture = str(file.metadata.get("general.architecture", "(none)"))
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(
            f"{file.path} holds the architecture {architecture}; a GGUF file is imported when it holds "
            f"{', '.join(sorted(FAMILIES))}",
            hint="a checkpoint of this model in safetensors form may still run",
        )
    if (num_parts := file.metadata.get("split.count", 1)) > 1:
        raise UnsupportedModel(
            f"{file.path} is one of {num_parts} parts of a model", hint="join the parts into one file first"
        )
    config = _config(file, architecture, family)
    outputs = [_output(file, tensor, family, config) for tensor in file.tensors if tensor.name != ROPE_FREQS]
    config |= _quantization(outputs)
    write_tokenizer(file.metadata, destination, config)
    _write_json(destination / "config.json", config)
    _write_json(destination / "generation_config.json", _generation_config(config))
    _write_safetensors(destination / "model.safetensors", file, outputs, progress)


@dataclass(frozen=True, slots=True)
class Output:
    """One GGUF tensor on its way: the names it gets, and the order its rows take."""

    tensor: Tensor
    name: str
    row_order: Array | None = None
    minus_one: bool = False

    @property
    def module(self) -> str:
        """The path of the layer the tensor belongs to."""
        return self.name.rpartition(".")[0]

    @property
    def specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, safetensors type, shape) of each array written, in the order `pieces` gives them."""
        tensor = self.tensor
        if tensor.kind in PLAIN:
            return [(self.name, PLAIN[tensor.kind], tensor.shape)]
        *rows, columns = tensor.shape
        groups = (*rows, columns // GROUP_SIZE)
        return [
            (self.name, "U32", (*rows, columns * BITS[tensor.kind] // 32)),
            (f"{self.module}.scales", "F32", groups),
            (f"{self.module}.biases", "F32", groups),
        ]

    def pieces(self, rows: Array) -> Iterator[tuple[Array, ...]]:
        """The data of `specs`, some rows at a time, from the tensor's bytes as `[rows, bytes per row]`."""
        if self.row_order is not None:
            rows = rows.reshape(len(self.row_order), -1)
        step = max(1, PIECE_BYTES // rows.shape[1])
        for start in range(0, len(rows), step):
            piece = rows[start : start + step]
            if self.row_order is not None:
                piece = rows[self.row_order[start : start + step]]
            if self.tensor.kind not in PLAIN:
                yield pack(piece, self.tensor.kind)
            elif self.minus_one:
                yield (np.ascontiguousarray(piece).view("<f4") - np.float32(1),)
            else:
                yield (np.ascontiguousarray(piece),)


def _size_bytes(name: str, kind: Kind, shape: tuple[int, ...]) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"{name} has the shape {list(shape)}, which {kind.name} cannot hold")
    count = 1
    for length in shape:
        count *= length
    return count // int(block) * int(block_bytes)


def _output(file: GGUFFile, tensor: Tensor, family: Family, config: dict[str, Any]) -> Output:
    """Where `tensor` goes. Raises UnsupportedModel for a tensor or a kind that has no place."""
    if tensor.kind not in PLAIN and tensor.kind not in BITS:
        raise UnsupportedModel(
            f"{file.path}: {tensor.name} is {tensor.kind.name}; imported are "
            f"{', '.join(kind.name for kind in (*BITS, *PLAIN))}",
            hint="ask for a Q4_K_M, Q4_0, Q8_0 or F16 file of this model",
        )
    stem, _, suffix = tensor.name.rpartition(".")
    block, _, part = stem.removeprefix("blk.").partition(".")
    if stem in TOP_NAMES:
        module = TOP_NAMES[stem]
    elif stem.startswith("blk.") and block.isdigit() and part in family.layer_names:
        module = f"model.layers.{block}.{family.layer_names[part]}"
    else:
        module = ""
    if not module or suffix not in ("weight", "bias"):
        raise UnsupportedModel(f"{file.path}: no place is known for the tensor {tensor.name}")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part, 0)
    row_order = None
    if family.permuted and heads:
        if heads * config["head_dim"] != tensor.shape[0]:
            raise ValueError(f"{tensor.name} has {tensor.shape[0]} rows for {heads} heads")
        row_order = _half_split_rows(heads, config["head_dim"])
    minus_one = family.norm_plus_one and stem.endswith("norm")
    if minus_one and tensor.kind != Kind.F32:
        raise ValueError(f"{tensor.name} is {tensor.kind.name}, and norms are F32")
    return Output(tensor, f"{module}.{suffix}", row_order, minus_one)


def _half_split_rows(heads: int, head_dim: int) -> Array:
    """Which GGUF row each row is. Rotary pairs lie side by side in GGUF, half a head apart in the checkpoint."""
    interleaved = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return interleaved.swapaxes(1, 2).reshape(-1)


def _config(file: GGUFFile, architecture: str, family: Family) -> dict[str, Any]:
    """The checkpoint's config.json without its quantization. Raises UnsupportedModel for what it cannot say."""
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}

    def field(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise UnsupportedModel(f"{file.path} is damaged: it has no field {architecture}.{key}")
        return value

    if "token_embd.weight" not in shapes:
        raise UnsupportedModel(f"{file.path} is no whole model: it has no token_embd.weight")
    if field("expert_count", 0):
        raise UnsupportedModel(f"{file.path} holds a mixture of experts, which is not imported from GGUF")
    hidden, heads = int(field("embedding_length")), int(field("attention.head_count"))
    head_dim = int(field("attention.key_length", hidden // heads))
    if (
        field("rope.dimension_count", head_dim) != head_dim
        or field("attention.value_length", head_dim) != head_dim
    ):
        raise UnsupportedModel(f"{file.path} rotates or keeps a part of each head only, which is not imported")
    vocab_size = shapes["token_embd.weight"][0]
    if len(file.metadata.get("tokenizer.ggml.tokens", ())) != vocab_size:
        raise UnsupportedModel(f"{file.path}: its vocabulary and its {vocab_size} embeddings differ in length")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "gelu_pytorch_tanh" if family.norm_plus_one else "silu",
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("rope.freq_base", 10000.0)),
        "max_position_embeddings": int(field("context_length")),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "torch_dtype": _torch_dtype(file.tensors),
    }
    if scaling := _rope_scaling(file, field, head_dim, config["rope_theta"]):
        config["rope_scaling"] = scaling
    if family.model_type == "gemma3_text":
        config |= _gemma_fields(field, config)
    return config


def _gemma_fields(field: Callable[..., Any], config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3 has besides. No GGUF states the query scale: it goes by head, but in the 27B with 62 layers."""
    by_width = config["num_hidden_layers"] == 62
    return {
        "sliding_window": int(field("attention.sliding_window")),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": float(field("rope.freq_base_swa", 10000.0)),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if by_width
        else config["head_dim"],
    }


def _torch_dtype(tensors: list[Tensor]) -> str:
    """The type most weights are in; that of packed ones is the type of their scales."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[{Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(tensor.kind, "float32")] += tensor.size_bytes
    return sizes.most_common(1)[0][0]


def _rope_scaling(file: GGUFFile, field: Callable[..., Any], head_dim: int, theta: float) -> dict[str, Any] | None:
    """The rope scaling as config.json says it, or None. Raises UnsupportedModel for kinds not known here."""
    kind = field("rope.scaling.type", "none")
    factor = float(field("rope.scaling.factor", 0.0) or field("rope.scale_linear", 1.0))
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"{file.path} scales its rope by {kind!r}, which is not imported")
    divisors = next((tensor for tensor in file.tensors if tensor.name == ROPE_FREQS), None)
    if divisors is None:
        return None
    values = file.rows(divisors).reshape(-1).view("<f4") if divisors.kind == Kind.F32 else np.zeros(0)
    scaling = {
        "rope_type": "llama3",
        "factor": float(values.max(initial=1.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_divisors(scaling, head_dim, theta)
    if values.shape != expected.shape or not np.allclose(values, expected, rtol=1e-4):
        raise UnsupportedModel(f"{file.path} scales its rope by factors ({ROPE_FREQS}) that follow no known rule")
    return scaling


def _llama3_divisors(scaling: dict[str, Any], head_dim: int, theta: float) -> Array:
    """What Llama 3.1 divides each rotary frequency by: 1 for short waves, `factor` for long ones, else a blend."""
    wave_len = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = (scaling[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    blend = (scaling["original_max_position_embeddings"] / wave_len - low) / (high - low)
    blend = np.clip(blend, 0.0, 1.0)
    divisors: Array = 1.0 / ((1.0 - blend) / factor + blend)
    return divisors


def _quantization(outputs: list[Output]) -> dict[str, Any]:
    """`quantization` of config.json: the commonest width, and each layer of another; empty when none is packed."""
    bits = {output.module: BITS[output.tensor.kind] for output in outputs if output.tensor.kind in BITS}
    if not bits:
        return {}
    common = Counter(bits.values()).most_common(1)[0][0]
    said: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": common, "mode": "affine"}
    for module, width in bits.items():
        if width != common:
            said[module] = {"group_size": GROUP_SIZE, "bits": width, "mode": "affine"}
    return {"quantization": said, "quantization_config": said}


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, file: GGUFFile, outputs: list[Output], progress: Progress) -> None:
    """Write the header, which the shapes alone decide, then the data of one tensor after another."""
    begun, starts = head(spec for output in outputs for spec in output.specs)
    done, total = 0, sum(output.tensor.size_bytes for output in outputs)
    with open(path, "wb") as out:
        out.write(begun)
        for output in outputs:
            places = [starts[name] for name, *_ in output.specs]
            for arrays in output.pieces(file.rows(output.tensor)):
                for at, array in enumerate(arrays):
                    out.seek(places[at])
                    places[at] += out.write(array.tobytes())
            done += output.tensor.size_bytes
            progress("import", done, total)
