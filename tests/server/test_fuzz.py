"""A short run of `make fuzz`: whatever is sent, the server neither fails nor hangs."""

from pathlib import Path

from server.openapi import OPERATIONS
from tests.fuzz import fuzz

SECONDS = 8


def test_nothing_that_is_sent_is_a_fault_of_the_servers(tiny: Path) -> None:
    counts = fuzz(tiny, SECONDS)
    asked = {tuple(told.split(" ")[:2]) for told in counts}
    assert asked <= OPERATIONS.keys()
    assert len(asked) > len(OPERATIONS) / 2
