"""Case 89: rows of 12 and of 3 tokens together, over every family: none sees the other's positions or padding."""

import pytest

from tests.zoo import ZOO, zoo_engine


@pytest.mark.parametrize("name", ZOO)
def test_twelve_and_three(name):
    watched = zoo_engine(name)
    requests = {step: watched.request(f"{step}", length, 6, seed=length) for step, length in {1: 12, 2: 3}.items()}
    alone = [watched.alone(request) for request in requests.values()]
    assert [row.output for row in watched.together(requests)] == alone
