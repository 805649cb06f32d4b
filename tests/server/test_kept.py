"""The store with two bounds: what is used last goes last."""

from server.kept import Kept


def test_the_least_recently_used_goes_first() -> None:
    kept: Kept[str, int] = Kept(max_bytes=30, max_entries=3)
    for number, key in enumerate("abc"):
        kept.put(key, number, 10)
    assert kept.get("a") == 0
    kept.put("d", 3, 5)
    assert [key in kept for key in "abcd"] == [True, False, True, True]
    assert (len(kept), kept.num_bytes) == (3, 25)
    kept.put("e", 4, 16)
    assert [key in kept for key in "acde"] == [False, False, True, True]


def test_an_entry_takes_the_place_of_another_and_can_be_dropped() -> None:
    kept: Kept[str, int] = Kept(max_bytes=30, max_entries=3)
    kept.put("a", 1, 10)
    kept.put("a", 2, 20)
    assert (kept.get("a"), kept.num_bytes) == (2, 20)
    kept.put("a", 3, 31)
    assert (kept.get("a"), kept.num_bytes) == (None, 0)
    kept.put("b", 4, 0)
    assert (kept.drop("b"), kept.drop("b"), len(kept)) == (True, False, 0)
