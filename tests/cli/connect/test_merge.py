"""Content comes into files without harm to what they hold: in any order, any style, or not at all."""

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxcel_cli.connect.merge import Unsafe, dump, merge, replaced
from mlxcel_cli.connect.recipe import Kind

READ = {Kind.JSON: json.loads, Kind.TOML: tomllib.loads, Kind.YAML: yaml.safe_load}
TABLE: Mapping[str, Any] = {"model": 'a "b"', "window": 8, "on": True, "providers": {"it.x": {"url": "http://é"}}}
ENTRY = {"models": [{"name": "it", "url": "http://x"}]}


@pytest.mark.parametrize("kind", Kind)
def test_what_is_written_is_read_back(kind):
    assert READ[kind](dump(kind, TABLE)) == TABLE


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("text", ["", "\n", " "])
def test_an_empty_file_gets_all_of_it(kind, text):
    assert READ[kind](merge(kind, text, TABLE)) == TABLE


@pytest.mark.parametrize("kind", Kind)
def test_a_second_time_changes_nothing(kind):
    once = merge(kind, dump(kind, {"other": 1}), TABLE)
    assert READ[kind](once) == {"other": 1, **TABLE}
    assert merge(kind, once, TABLE) == once


def test_json_keeps_order_and_indent_and_replaces_what_has_the_name():
    text = '{\n    "b": {"x": 1, "y": 2},\n    "a": [{"name": "it", "url": "old"}, {"name": "else"}]\n}\n'
    merged = merge(Kind.JSON, text, {"b": {"x": 3}, "a": [{"name": "it", "url": "new"}]})
    assert json.loads(merged) == {"b": {"x": 3, "y": 2}, "a": [{"name": "it", "url": "new"}, {"name": "else"}]}
    assert list(json.loads(merged)) == ["b", "a"]
    assert merged.startswith('{\n    "b"')
    assert replaced(Kind.JSON, text, {"b": {"x": 3}, "c": 1}) == ["b.x"]


@pytest.mark.parametrize(
    "text", ['{"a": 1, // why\n "b": 2}', '{"a": 1, "a": 2}', '{"a": 1,}', "[" * 100_000], ids=len
)
def test_json_with_more_than_json_is_left_alone(text):
    with pytest.raises(Unsafe, match="not plain JSON"):
        merge(Kind.JSON, text, {"b": 1})


def test_toml_puts_values_before_tables_and_keeps_comments():
    text = "# mine\n[features]\nweb = true # yes"
    merged = merge(Kind.TOML, text, {"model": "m", "providers": {"it": {"url": "u"}}})
    assert tomllib.loads(merged) == {"model": "m", "features": {"web": True}, "providers": {"it": {"url": "u"}}}
    assert "# mine\n[features]\nweb = true # yes\n" in merged


def test_toml_adds_beside_tables_of_the_same_name():
    merged = merge(Kind.TOML, '[providers.other]\nurl = "o"\n', {"providers": {"it": {"url": "u"}}})
    assert tomllib.loads(merged)["providers"] == {"other": {"url": "o"}, "it": {"url": "u"}}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.TOML, 'model = "another"\n'),
        (Kind.TOML, 'providers = { other = "inline" }\n'),
        (Kind.TOML, "model = "),
        (Kind.YAML, "model: another\n"),
        (Kind.YAML, "a: [1, 2\n"),
        (Kind.YAML, "a: 1\n---\nb: 2\n"),
        (Kind.YAML, "{a: 1, b: 2}\n"),
        (Kind.YAML, "a: !mine x\n"),
    ],
    ids=str,
)
def test_what_cannot_be_added_to_with_certainty_is_left_alone(kind, text):
    with pytest.raises(Unsafe):
        merge(kind, text, {"model": "m", "providers": {"it": {"url": "u"}}})


@pytest.mark.parametrize(
    "text",
    [
        "models:\n  - name: other\n    url: y # why\nrules: []\n",
        "# head\nmodels:\n- name: other\n  url: y\n",
        "rules: []\nmodels:   # mine\n\n    # first\n    - name: other\n      url: y\n",
    ],
    ids=len,
)
def test_yaml_lists_get_an_entry_in_their_own_indent(text):
    merged = merge(Kind.YAML, text, ENTRY)
    assert yaml.safe_load(merged)["models"] == [*ENTRY["models"], {"name": "other", "url": "y"}]
    assert [line for line in text.splitlines() if line not in merged.splitlines()] == []


@pytest.mark.parametrize(
    "text",
    ["models: []\n", "models: [{name: other}]\n", "models:\n  - name: it\n    url: z\n", "models: 3\n"],
    ids=len,
)
def test_yaml_lists_in_another_style_or_with_the_name_are_left_alone(text):
    with pytest.raises(Unsafe):
        merge(Kind.YAML, text, ENTRY)


def test_yaml_reaches_lists_below():
    text = "version: 1\nendpoints:\n  # mine\n  custom:\n    - name: other\n  agents: {}\n"
    merged = merge(Kind.YAML, text, {"endpoints": {"custom": [{"name": "it", "models": {"default": ["m"]}}]}})
    found = yaml.safe_load(merged)["endpoints"]
    assert [one["name"] for one in found["custom"]] == ["it", "other"]
    assert found["agents"] == {}
    assert "  # mine\n" in merged


def test_a_yaml_list_as_a_file_gets_its_entry():
    merged = merge(Kind.YAML, "# mine\n- model_id: other\n", [{"model_id": "it"}])
    assert yaml.safe_load(merged) == [{"model_id": "it"}, {"model_id": "other"}]
    assert "# mine" in merged


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(old=st.dictionaries(st.text(max_size=5), VALUES, max_size=4), flow=st.booleans())
def test_any_yaml_is_added_to_rightly_or_left_alone(old, flow):
    text = yaml.safe_dump(old, default_flow_style=flow, allow_unicode=True)
    try:
        merged = merge(Kind.YAML, text, ENTRY)
    except Unsafe:
        return
    before, found = yaml.safe_load(text), yaml.safe_load(merged)
    assert [*before, *([] if "models" in before else ["models"])] == [*found]
    assert all(found[key] == value for key, value in before.items() if key != "models")
    assert ENTRY["models"][0] in found["models"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.JSON, "null\n"),
        (Kind.YAML, "null\n"),
        (Kind.JSON, '{"n": 1e400}\n'),
        (Kind.JSON, '{"n": 12345678901234567890123.5}\n'),
    ],
    ids=str,
)
def test_what_would_be_spoilt_is_left_as_it_is(kind, text):
    with pytest.raises(Unsafe):
        merge(kind, text, {"a": "b"})


def test_a_list_in_the_place_of_settings_is_named():
    assert replaced(Kind.JSON, "[1]", {"a": "b"}) == ["all of it"]
    assert replaced(Kind.JSON, '{"a": [1]}', {"a": {"b": 1}}) == ["a"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.JSON, '{\n  "other": 1\n}\n'),
        (Kind.TOML, "# mine\nother = 1\n"),
        (Kind.YAML, "# mine\nother: 1\nmodels:\n- name: else\n"),
    ],
)
def test_a_file_keeps_its_line_ends(kind, text):
    content = ENTRY if kind is Kind.YAML else TABLE
    merged = merge(kind, text.replace("\n", "\r\n"), content)
    assert merged == merge(kind, text, content).replace("\n", "\r\n")
    assert merge(kind, merged, content) == merged


def test_of_mixed_line_ends_each_line_keeps_its_own():
    merged = merge(Kind.TOML, "a = 1\r\nb = 2\n", {"table": {"c": 3}})
    assert merged == "a = 1\r\nb = 2\n\n[table]\nc = 3\n"


def test_json_with_half_of_a_surrogate_pair_is_left_alone():
    with pytest.raises(Unsafe, match="half of a surrogate pair"):
        merge(Kind.JSON, r'{"a": "\ud800"}', {"b": 1})


@pytest.mark.parametrize("kind", [Kind.TOML, Kind.YAML])
@pytest.mark.parametrize("text", ["# mine", "# mine\n", "# mine\n# too"])
def test_comments_alone_stay_before_what_is_added(kind, text):
    merged = merge(kind, text, TABLE)
    assert merged.startswith(text.rstrip("\n") + "\n")
    assert READ[kind](merged) == TABLE
