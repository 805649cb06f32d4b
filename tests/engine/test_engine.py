"""What an engine says of itself and hands to the plan, from its settings and its model."""

import pytest

from engine.request import Request
from tests.engines import Watched
from tests.tiny import write_checkpoint


@pytest.mark.parametrize(("family", "mixes"), [("llama", True), ("mamba2", False)])
def test_mixed_steps_are_said_to_be_none_where_cuts_change_bits(tmp_path, family, mixes):
    folder = write_checkpoint(tmp_path, family)
    for budget in (0, 64):
        engine = Watched(folder, mixed_step=budget).engine
        assert engine.plan().mixes == (mixes and budget > 0)
        assert any(note.startswith("mixed steps: none") for note in engine.notes) == (not mixes and budget > 0)


def test_the_plan_has_the_bounds_of_the_settings(tmp_path):
    folder = write_checkpoint(tmp_path)
    settings = {"prefill_chunk_size": 64, "max_batch_prefill": 3, "max_batch_prefill_tokens": 40, "mixed_step": 30}
    engine = Watched(folder, **settings, no_prompt_cache=False).engine
    plan = engine.plan()

    def sizes(*prompts, **options):
        rows = [engine.submit(Request("r", prompt)) for prompt in prompts]
        return [piece.num_tokens for piece in plan.pieces(rows, **{"decoding": False, **options})]

    assert sizes(*((i,) * 10 for i in range(5))) == [10, 10, 10]
    assert sizes(*((i,) * 15 for i in range(5))) == [15, 15]
    assert sizes((1,) * 100) == [64]
    assert sizes((1,) * 100, decoding=True, beside=2) == [28]
    assert sizes((1,) * 17, (1,) * 17) == [17]
