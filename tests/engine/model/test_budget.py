"""What is set aside for rows, prompt cache and prefill pieces, and that a piece stays within its part."""

import mlx.core as mx
import pytest

from engine.model.budget import PIECE_SHARE, SHARE, Transient, budget, piece_tokens, transient_of
from engine.plan import ALONE_MAX_TOKENS, GRID_TOKENS, Piece
from engine.size import Bound
from tests.engines import Watched
from tests.zoo import write_zoo, zoo_model

FAMILIES = (
    "llama",
    "gemma3_text",
    "deepseek_v2",
    "deepseek_v3",
    "mixtral",
    "qwen3_next",
    "mamba2",
    "gemma2",
    "rwkv7",
)
PIECE = Transient(token_bytes=1000, pair_bytes=10, logit_bytes=5000)


def assert_pieces_fit(watched, size):
    """Three pieces of `size` tokens each take on their way no more than is said."""
    engine = watched.engine
    row = engine.submit(watched.request("r", 3 * size + 1, 2))
    for start in range(0, 3 * size, size):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.prefill([Piece(row, start, start + size)])
        assert row.storage is not None
        stored = engine.kv_bytes([row])
        taken = mx.get_peak_memory() - before - stored
        assert taken <= engine.room.transient.bytes_of(start, size) + engine.room.transient.logit_bytes
    engine.release(row)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_piece_takes_no_more_than_is_said(name, portable, tmp_path):
    watched = Watched(write_zoo(tmp_path, name), portable=portable, decode_storage_backend="dense")
    for size in (64, 256) if watched.engine.plan()._grid_tokens else (64, 256, 1024):
        assert_pieces_fit(watched, size)


@pytest.mark.real
def test_a_piece_of_the_built_in_model(real_checkpoint):
    assert_pieces_fit(Watched(real_checkpoint, decode_storage_backend="dense"), 128)


def test_the_longest_piece_that_fits_is_found():
    for start in (0, 100, 5000):
        for num_bytes in (1, 50_000, 2_000_000):
            most = PIECE.most_tokens(start, num_bytes)
            assert most % 16 == 0
            assert most == 16 or PIECE.bytes_of(start, most) <= num_bytes
            assert PIECE.bytes_of(start, most + 16) > num_bytes


def given(asked, free, **more):
    return budget(Bound(asked), free, PIECE, **{"piece_tokens": 64, "context_tokens": 1000, "num_rows": 2, **more})


def test_nine_tenths_of_what_is_free_less_what_a_forward_takes():
    piece_bytes = 64 * (1000 + 1000 * 10)
    found = given("auto", 10_000_000)
    assert found.piece_bytes == piece_bytes
    assert found.cache_bytes == int(SHARE * 10_000_000) - piece_bytes - 2 * 5000


def test_a_forward_gets_no_more_than_its_share_and_no_less_than_it_must():
    assert given("auto", 1_000_000).piece_bytes == int(PIECE_SHARE * 1_000_000)
    assert given("auto", 1000).piece_bytes == PIECE.bytes_of(1000, 16)
    assert given("auto", 1000).cache_bytes == 0


def test_a_number_is_taken_as_it_is_and_none_bounds_nothing():
    assert given("3MB", 1000).cache_bytes == 3_000_000
    assert given("none", 1000).cache_bytes is None
    assert given("none", 1000).piece_bytes is None


def test_pieces_are_as_long_as_a_plan_can_ask_for():
    assert piece_tokens(0, on_grid=False) == ALONE_MAX_TOKENS
    assert piece_tokens(0, on_grid=True) == GRID_TOKENS
    assert piece_tokens(7, on_grid=True) == 7


def test_scores_are_kept_unless_attention_is_fused():
    model, config = zoo_model("llama"), {"num_attention_heads": 4}
    kept = {
        (mode, compiled): transient_of(model, config, vocab_size=10, mode=mode, compiled=compiled).pair_bytes > 0
        for mode in (None, "spans", "rows", "alone")
        for compiled in (False, True)
    }
    assert [place for place, is_kept in kept.items() if not is_kept] == [("spans", True)]
