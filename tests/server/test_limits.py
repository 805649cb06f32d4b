"""Bodies that are too deep or too large in one place are refused, those at the bound are not."""

from typing import Any

import pytest

from engine.errors import RequestError
from server import limits
from server.limits import MAX_DEPTH, check_limits


def nested(depth: int, *, wide: bool = False) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if wide else [value]
    return value


@pytest.mark.parametrize("wide", [True, False])
def test_depth(wide: bool) -> None:
    check_limits(nested(MAX_DEPTH, wide=wide))
    for depth in (MAX_DEPTH + 1, 500):
        with pytest.raises(RequestError, match="nested too deeply"):
            check_limits(nested(depth, wide=wide))


def test_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ITEMS", 3)
    monkeypatch.setattr(limits, "MAX_CHARACTERS", 5)
    at_the_bound = {"list": [1, 2, 3], "object": {"a": 1, "b": 2, "c": "xxxxx"}}
    check_limits(at_the_bound)
    for beyond in ([1] * 4, {"a": 1, "b": 2, "c": 3, "d": 4}, "xxxxxx"):
        with pytest.raises(RequestError, match="at most"):
            check_limits({"deep": [at_the_bound, {"here": beyond}]})
