"""Sizes are read as people write them, and written as they would be read."""

import pytest

from engine.size import Bound, Size


@pytest.mark.parametrize(
    ("said", "num_bytes"),
    [
        ("2GiB", 2 << 30), ("500MB", 500_000_000), ("1048576", 1 << 20), (" 1.5 kib ", 1536), ("0", 0), ("7B", 7),
        ("1tb", 10**12), (12, 12),
    ],
)  # fmt: skip
def test_read(said, num_bytes):
    assert Size(said) == num_bytes


@pytest.mark.parametrize("said", ["", "GiB", "-1", "2 G", "1e3", "2GiBs", "nan"])
def test_no_size(said):
    with pytest.raises(ValueError, match="no size"):
        Size(said)


@pytest.mark.parametrize(("num_bytes", "written"), [(2 << 30, "2GiB"), (1536, "1536"), (3072, "3KiB"), (0, "0")])
def test_written(num_bytes, written):
    assert str(Size(num_bytes)) == written
    assert Size(written) == num_bytes


@pytest.mark.parametrize(
    ("said", "written", "num_bytes"),
    [("auto", "auto", None), (" None ", "none", None), ("2GiB", "2GiB", 2 << 30), (3072, "3KiB", 3072)],
)
def test_a_bound_is_a_word_or_a_size(said, written, num_bytes):
    bound = Bound(said)
    assert (bound, bound.num_bytes) == (written, num_bytes)
    assert type(bound.num_bytes) in (int, type(None))
    assert Bound(bound) == bound


@pytest.mark.parametrize("said", ["", "automatic", "-1"])
def test_no_bound(said):
    with pytest.raises(ValueError, match="no size"):
        Bound(said)
