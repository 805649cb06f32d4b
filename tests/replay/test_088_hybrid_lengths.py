"""Case 88: prompts of 3, 9 and 40 tokens in pieces of 8, where layers keep states: each is as it is alone."""

import pytest

from tests.zoo import ZOO, zoo_engine

HYBRIDS = [name for name, family in ZOO.items() if family.mode.startswith("rows")]
LENGTHS = {1: 3, 2: 9, 3: 40}
PIECE = 8


@pytest.mark.parametrize("name", HYBRIDS)
def test_each_row_equals_itself_alone(name):
    watched = zoo_engine(name)
    requests = {step: watched.request(f"{step}", length, 6, seed=step) for step, length in LENGTHS.items()}
    alone = [watched.alone(request) for request in requests.values()]
    assert [row.output for row in watched.together(requests, piece=PIECE)] == alone


def test_a_batch_that_everybody_left_takes_new_rows():
    """Rows that end at the same step leave nothing behind that the next ones could meet."""
    watched = zoo_engine("qwen3_next")
    requests = {
        step: watched.request(f"{step}", length, 4, seed=step) for step, length in {1: 3, 6: 9, 7: 40}.items()
    }
    alone = [watched.alone(request) for request in requests.values()]
    first, *others = watched.together(requests, piece=PIECE)
    assert len(first.output) == 4
    assert [row.output for row in (first, *others)] == alone
