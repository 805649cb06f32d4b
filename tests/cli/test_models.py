"""pull, list and rm."""

import json

import pytest

from engine.model.store import Store
from tests.tiny import write_checkpoint


@pytest.fixture
def stored():
    """A store with one small checkpoint, `mlx-community/tiny`."""
    store = Store()
    with store.begin("mlx-community/tiny", source="made here") as folder:
        write_checkpoint(folder)
    return store


def test_an_empty_store_is_said_on_stderr(mlxcel):
    ended = mlxcel("list")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "the store is empty\nhint: mlxcel pull smollm2-135m\n"
    assert mlxcel("list", "--json").out == "[]\n"


def test_list_is_a_table_without_colour(stored, mlxcel):
    heading, row = mlxcel("list").out.splitlines()
    assert heading.split() == ["NAME", "SIZE", "MODIFIED", "SOURCE"]
    assert row.split() == ["tiny", *row.split()[1:3], "just", "now", "made", "here"]
    assert heading.index("MODIFIED") == row.index("just")


def test_list_as_json_holds_the_whole_entry(stored, mlxcel):
    (entry,) = stored.list()
    (row,) = json.loads(mlxcel("list", "--json").out)
    assert row == {
        "name": "mlx-community/tiny",
        "short_name": "tiny",
        "path": str(entry.path),
        "size_bytes": entry.size_bytes,
        "source": "made here",
        "modified_s": entry.modified_s,
    }


def test_rm_asks_a_terminal_and_needs_yes_elsewhere(stored, mlxcel):
    ended = mlxcel("rm", "tiny")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: rm would delete mlx-community/tiny\nhint: --yes says that it may\n"
    assert stored.find("tiny")
    ended = mlxcel("rm", "tiny", "--yes")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.startswith("deleted mlx-community/tiny (")
    assert stored.find("tiny") is None


def test_rm_of_what_is_not_there_names_the_nearest(stored, mlxcel):
    ended = mlxcel("rm", "tinny", "--yes")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: no model called 'tinny' is in the store\nhint: did you mean tiny?\n"


def test_pull_prints_where_the_model_lies(stored, mlxcel):
    ended = mlxcel("pull", "tiny")
    assert (ended.code, ended.out) == (0, f"{stored.find('tiny').path}\n")


def test_pull_of_an_unknown_model(mlxcel):
    ended = mlxcel("pull", "smollm2")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: no model is known as 'smollm2'\nhint: did you mean smollm2-135m?")
