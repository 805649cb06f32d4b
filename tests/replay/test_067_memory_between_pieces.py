"""Case 67: what one piece of a long prompt took is not there any more when the next one runs."""

from pathlib import Path

import mlx.core as mx
import pytest

from tests.engines import Watched, drive
from tests.tiny import write_checkpoint


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("portable", [False, True])
def test_a_long_prompt_peaks_where_a_short_one_does(tmp_path: Path, family: str, portable: bool) -> None:
    watched = Watched(write_checkpoint(tmp_path, family), portable=portable, prefill_chunk_size=128)
    engine, peaks = watched.engine, []
    most_bytes = engine.room.piece_bytes
    drive(engine, [watched.request("warm", 300, 2)])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    def after_a_tick(scheduler) -> None:
        peaks.append(mx.get_peak_memory() - before)
        mx.reset_peak_memory()
        assert not scheduler.prefilling or mx.get_cache_memory() <= most_bytes

    drive(engine, [watched.request("long", 3000, 2)], on_tick=after_a_tick)
    assert len(peaks) >= 3000 // 128
    # A layer's buffers exist twice while they grow.
    assert max(peaks) <= most_bytes + engine.room.transient.logit_bytes + 2 * engine.storable.row_bytes
