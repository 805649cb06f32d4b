"""Attention over spans: what prompts of several lengths in one forward make of tokens, masks and memory."""

import mlx.core as mx
import pytest

import engine.forward
from engine.cache.attend import Batch
from engine.plan import Piece
from tests.engines import Watched
from tests.tiny import write_checkpoint

LENGTHS = (3, 40, 17, 25)
WINDOW = 8


@pytest.fixture(params=[False, True], ids=["compiled", "portable"])
def watched(request, tmp_path):
    watched = Watched(write_checkpoint(tmp_path, "gemma3_text"), portable=request.param)
    assert watched.engine.mode == "spans"
    if not request.param and "kernels: portable" in watched.engine.notes[0]:
        pytest.skip(watched.engine.notes[0])
    return watched


def stored(watched, lengths):
    """Run the prompts in one forward."""
    requests = [watched.request(f"row {i}", length, 1, seed=i) for i, length in enumerate(lengths)]
    watched.engine.prefill([Piece(watched.engine.submit(r), 0, len(r.prompt)) for r in requests])


def test_nothing_is_padded_and_no_mask_joins_two_prompts(watched, monkeypatch):
    batches = []

    class Kept(Batch):
        def __init__(self, places):
            super().__init__(places)
            batches.append(self)

    monkeypatch.setattr(engine.forward, "Batch", Kept)
    stored(watched, LENGTHS)
    (batch,) = batches
    assert batch.num_tokens == batch.positions.size == sum(LENGTHS)
    shapes = [mask.shape for mask in batch._masks.values()]
    if "kernels: portable" in watched.engine.notes[0]:
        assert sorted(shapes) == [(n, n) for n in sorted(LENGTHS) if n > WINDOW]
    else:
        assert shapes == []


def test_memory_grows_with_the_tokens_of_prompts_and_not_with_their_square(watched):
    if "kernels: portable" in watched.engine.notes[0]:
        pytest.skip("MLX's own attention on the CPU makes the scores of a prompt")
    stored(watched, [8])
    peaks = []
    for length in (512, 1024, 2048):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        stored(watched, [length] * 4)
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[2] - peaks[1] < 2.2 * (peaks[1] - peaks[0])
