"""pull, list, cp and rm."""

import json
import os
import sys

import pytest

from engine.model.store import Store
from mlxcel_cli import render
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
    assert ended.err.startswith("error: no model is known as 'smollm2': ")
    assert "\nhint: did you mean smollm2-135m? " in ended.err


@pytest.fixture
def three():
    """A store with three, whose orders by name, size and age differ."""
    store = Store()
    for age, (name, layers) in enumerate((("one/b", 2), ("one/c", 4), ("one/a", 3))):
        with store.begin(name) as folder:
            write_checkpoint(folder, num_hidden_layers=layers)
        os.utime(store.models / name / ".mlxcel.json", (1000 - age, 1000 - age))
    return store


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ([], "abc"),
        (["--sort", "name", "--reverse"], "cba"),
        (["--sort", "size"], "cab"),
        (["--sort", "size", "-r"], "bac"),
        (["--sort", "modified"], "bca"),
    ],
)
def test_list_is_in_the_order_asked_for(flags, order, three, mlxcel):
    rows = mlxcel("list", *flags).out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [f"one/{name}" for name in order]
    rows = json.loads(mlxcel("list", "--json", *flags).out)
    assert [row["name"] for row in rows] == [f"one/{name}" for name in order]


def test_list_on_a_terminal_ends_with_what_all_take(three, mlxcel, monkeypatch):
    monkeypatch.setattr(render, "is_terminal", lambda stream: stream is sys.stdout)
    size = render.size(sum(entry.size_bytes for entry in three.list()))
    three.copy("one/a", "d")
    small = sum(path.stat().st_size for path in (three.models / "local/d").glob("*.json"))
    ended = mlxcel("list")
    assert len(ended.out.splitlines()) == 5
    assert ended.err.startswith("4 models, ")
    total = float(ended.err.split()[2])
    assert total == pytest.approx(float(size.split()[0]) + small / 1000, abs=3), "shared weights count once"


def test_cp_gives_a_second_name(stored, mlxcel):
    ended = mlxcel("cp", "tiny", "other")
    entry = stored.find("other")
    assert (ended.code, ended.out) == (0, f"{entry.path}\n")
    assert ended.err.startswith("copied tiny to other (")
    assert (entry.name, entry.source) == ("local/other", "made here")
    assert [row.split()[0] for row in mlxcel("list").out.splitlines()[1:]] == ["other", "tiny"]
    assert mlxcel("rm", "tiny", "--yes").code == 0
    assert mlxcel("run", "other", "-p", "hello", "-n", "2").code == 0


def test_cp_refuses_a_name_that_is_taken_and_a_model_that_is_not_there(stored, mlxcel):
    for name in ("tiny", "mlx-community/tiny"):
        assert mlxcel("cp", "tiny", name).err.startswith("error: mlx-community/tiny is in the store already\n")
    assert mlxcel("cp", "tiny", "smollm2-135m").err.startswith("error: smollm2-135m is the name of a built-in")
    assert mlxcel("cp", "tiny", "../x").err.startswith("error: '../x' is no name for a model\n")
    assert mlxcel("cp", "tinny", "x").err.endswith("hint: did you mean tiny?\n")
    assert [entry.name for entry in stored.list()] == ["mlx-community/tiny"]


def test_cp_refuses_a_name_that_means_something_else(stored, mlxcel):
    ended = mlxcel("cp", "tiny", "all")
    assert ended.err == (
        "error: all means every model of the store\n"
        "hint: local/all would be asked for as all: choose another name, or an owner "
        "other than local, mlxcel, mlx-community\n"
    )
    assert mlxcel("cp", "tiny", "local/smollm2-135m").err.startswith(
        "error: smollm2-135m is the name of a built-in"
    )
    assert mlxcel("cp", "tiny", "local/tiny").err.startswith("error: mlx-community/tiny is in the store already\n")
    assert mlxcel("cp", "tiny", "someone/tiny").code == 0


def test_list_says_the_owner_where_several_have_the_name(stored, mlxcel):
    with stored.begin("local/tiny") as folder:
        write_checkpoint(folder)
    assert [row.split()[0] for row in mlxcel("list").out.splitlines()[1:]] == ["local/tiny", "mlx-community/tiny"]


def test_list_on_a_terminal_passes_over_a_link_to_nothing(stored, mlxcel, monkeypatch):
    (stored.find("tiny").path / "link").symlink_to("nothing")
    monkeypatch.setattr(render, "is_terminal", lambda stream: stream is sys.stdout)
    ended = mlxcel("list")
    assert ended.code == 0
    assert ended.err.startswith("1 model, ")


def test_rm_in_a_store_that_cannot_be_written_is_one_line(stored, mlxcel):
    locks = stored.home / "locks"
    locks.rename(stored.home / "away")
    locks.touch()
    ended = mlxcel("rm", "tiny", "--yes")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: the store at {stored.home} cannot be written: File exists\n"


def test_rm_of_several_deletes_all_or_none(three, mlxcel):
    ended = mlxcel("rm", "one/a", "one/z", "--yes")
    assert ended.code == 1
    assert "'one/z' is in the store" in ended.err
    assert len(three.list()) == 3
    assert mlxcel("rm", "one/a", "one/b").err.startswith("error: rm would delete one/a and one/b\n")
    ended = mlxcel("rm", "one/a", "one/b", "one/a", "--yes")
    assert ended.code == 0
    assert [line.split(" (")[0] for line in ended.err.splitlines()] == ["deleted one/a", "deleted one/b"]
    assert [entry.name for entry in three.list()] == ["one/c"]


def test_rm_asks_with_sizes(three, mlxcel, monkeypatch):
    asked = []
    monkeypatch.setattr(render, "is_terminal", lambda stream: stream is sys.stdin)
    monkeypatch.setattr(render, "confirmed", lambda question: asked.append(question) or len(asked) > 1)
    assert mlxcel("rm", "one/a", "one/b").code == 1
    assert len(three.list()) == 3
    a, b = (render.size(three.find(f"one/{name}").size_bytes) for name in "ab")
    assert mlxcel("rm", "one/a", "one/b").code == 0
    assert asked == [f"Delete one/a ({a}) and one/b ({b})?"] * 2
    assert [entry.name for entry in three.list()] == ["one/c"]
