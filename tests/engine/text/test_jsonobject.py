"""A JSON object in pieces: what parsers take is taken, in any chunking, and clients read it as it is read here."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from engine.text.jsonobject import MAX_DEPTH, JsonObject, whole_part

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


def read(chunks: Any) -> tuple[int, JsonObject]:
    scanned = JsonObject()
    return sum(scanned.feed(chunk) for chunk in chunks), scanned


@settings(deadline=None)
@given(value=OBJECTS, escapes=st.booleans(), indent=st.sampled_from([None, 1]))
def test_every_beginning_is_taken_and_read_as_anthropics_client_reads_it(
    value: Any, escapes: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=escapes, indent=indent)
    for length in range(1, len(text) + 1):
        taken, scanned = read([text[:length]])
        assert (taken, scanned.state) == (length, "ended" if length == len(text) else "open")
        assert json.loads(whole_part(text[:length])) == from_json(text[:length].encode(), partial_mode=True)


@settings(deadline=None)
@given(value=OBJECTS, data=st.data())
def test_what_is_broken_is_seen_at_once_in_any_chunking(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    at = data.draw(st.integers(1, len(text) - 1))
    broken = (
        text[:at] + data.draw(st.sampled_from('{}[]",:\\u0e.-tx \n')) + text[at + data.draw(st.integers(0, 1)) :]
    )
    taken, scanned = read([broken])
    again, letters = read(broken)
    assert (taken, scanned.state, scanned.whole) == (again, letters.state, letters.whole)
    from_json(broken[:taken].encode(), partial_mode=True)
    if scanned.state == "ended":
        assert isinstance(json.loads(broken[:taken]), dict)
    elif "\\u" not in broken and "NaN" not in broken:
        with pytest.raises(ValueError, match=r"line \d"):
            json.loads(broken)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("[", 0), ('{"a" 1}', 5), ('{"a": 01}', 7), ('{"a": .5}', 6), ('{"a": -}', 7), ('{"a": 1.}', 8),
        ('{"a": NaN}', 6), ('{"a": truth}', 9), ("{'a': 1}", 1), ('{"a": 1,}', 8), ('{"a": [1,]}', 9),
        ('{"a": "\\d"}', 8), ('{"a": "\n"}', 7), ('{"a": "\\ud800"}', 13), ('{"a": "\\udc00"}', 12),
        ('{"a": "\\ud800\\u0041"}', 18), ("{,", 1), ("{:", 1), ('{"a":1]', 6),
    ],
)  # fmt: skip
def test_what_is_no_object(text: str, taken: int) -> None:
    found, scanned = read([text])
    assert (found, scanned.state) == (taken, "broken")


def test_behind_its_end_nothing_is_taken() -> None:
    assert JsonObject().feed('{"a": {}}}') == 9


def test_depth_is_bounded() -> None:
    deep = '{"a":' + "[" * (MAX_DEPTH - 1)
    assert read([deep])[1].state == "open"
    taken, scanned = read([deep + "[["])
    assert (taken, scanned.state) == (len(deep), "broken")
    assert json.loads(whole_part(deep + "[[")) == from_json(deep.encode(), partial_mode=True)


def test_no_beginning_is_an_empty_object() -> None:
    assert whole_part("") == whole_part("[") == "{}"
