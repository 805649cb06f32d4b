"""Tiny GGUF files, wheels and an index that offers them: what the importer and the fetcher are tried on."""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quants
from tokenizers import pre_tokenizers

from engine.model.store import BuiltIn, Wheel

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 2, 4, 2, 16, 96
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = (*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "1 2")
TOKENS = (*LETTERS, *(merge.replace(" ", "") for merge in MERGES))
TYPES = [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAME = "tiny.gguf"


def weights(seed: int = 0, *, vocab: int = len(TOKENS), tied: bool = True) -> dict[str, np.ndarray]:
    """Float32 tensors of a tiny llama by their GGUF names, in GGUF's own row order."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(length: int = HIDDEN) -> np.ndarray:
        return (1 + 0.1 * random.standard_normal(length)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(vocab, HIDDEN), "output_norm.weight": norm()}
    for i in range(LAYERS):
        tensors |= {
            f"blk.{i}.attn_norm.weight": norm(),
            f"blk.{i}.attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": norm(),
            f"blk.{i}.ffn_gate.weight": matrix(FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": matrix(FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": matrix(HIDDEN, FFN),
        }
    if not tied:
        tensors["output.weight"] = matrix(vocab, HIDDEN)
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    architecture: str = "llama",
    kind: Callable[[str], Kind] = lambda name: Kind.F32,
    tokenizer: Callable[[GGUFWriter], None] | None = None,
    more: Callable[[GGUFWriter], None] = lambda writer: None,
    theta: float = 10000.0,
) -> Path:
    """Write `tensors` (a tiny llama when not given): matrices in the kind `kind(name)` says, vectors in F32."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(theta)
    (tokenizer or byte_level_tokenizer)(writer)
    more(writer)
    for name, array in (tensors or weights()).items():
        asked = kind(name) if array.ndim > 1 else Kind.F32
        writer.add_tensor(name, quants.quantize(array, asked), raw_dtype=asked)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_tokenizer(writer: GGUFWriter, pre: str = "smollm") -> None:
    """A byte-level vocabulary with a few merges and chat tokens."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(TOKENS))
    writer.add_token_types(TYPES)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def write_wheel(folder: Path, gguf: Path) -> Path:
    """A wheel `tiny-model 1.0` that holds the file `gguf`."""
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, f"tiny_model/{NAME}")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


def built_in(gguf: Path, wheel: Path) -> BuiltIn:
    """The entry under which `wheel` would be known."""
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return BuiltIn((Wheel("tiny-model", "1.0", NAME, wheel.stat().st_size),), sha256, "Apache-2.0", "for tests")


@contextmanager
def index(wheel: Path, *, form: str = "json", sha256: str | None = None) -> Iterator[str]:
    """A package index on this machine; yields its URL. `sha256` replaces the digest it states for the wheel."""
    content = wheel.read_bytes()
    digest = sha256 or hashlib.sha256(content).hexdigest()
    if form == "json":
        listed: dict[str, Any] = {"filename": wheel.name, "url": f"../../files/{wheel.name}"}
        project = {
            "meta": {"api-version": "1.0"},
            "name": "tiny-model",
            "files": [{**listed, "hashes": {"sha256": digest}}],
        }
        page, kind = json.dumps(project), "application/vnd.pypi.simple.v1+json"
    else:
        page = f'<html><body><a href="../../files/{wheel.name}#sha256={digest}">{wheel.name}</a></body></html>'
        kind = "text/html"
    answers = {"/simple/tiny-model/": (page.encode(), kind), f"/files/{wheel.name}": (content, "application/zip")}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, content_type = answers.get(self.path, (b"", ""))
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", content_type or "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()
