"""What a row is said to take is what it takes at most, in every kind of family, as the engine runs it."""

import pytest

from engine.cache.sizes import layers_of, row_bytes, token_bytes
from tests.zoo import zoo_engine

FAMILIES = (
    "llama", "gemma3_text", "gemma2", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next", "mamba2", "jamba",
    "lfm2", "recurrent_gemma", "rwkv7", "falcon_h1", "llama4", "gemma3n",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_holds_no_more_than_is_said(name):
    watched = zoo_engine(name)
    layers = layers_of(watched.engine._forward._model, watched.engine._forward.cache_dtype)
    assert watched.engine.storable.token_bytes == token_bytes(layers)
    for num_tokens in (1, 204, 300, 700):
        row = watched.engine.submit(watched.request("a", num_tokens, 9))
        watched.store(row, 256)
        stored = sum(group.stored_bytes(num_tokens) for group in layers)
        assert row.storage is not None
        held = sum(array.nbytes for array in row.storage.arrays())
        assert held <= row_bytes(layers, num_tokens, 256) <= 2 * stored + row_bytes(layers, 256, 256)
        watched.engine.release(row)
