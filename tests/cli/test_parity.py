"""`mlxcel parity` on a tiny model: every front answers alike, and a difference is seen and said."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlxcel_cli import parity
from mlxcel_cli.parity import Said, cases, first_difference
from tests.cli.conftest import Outcome
from tests.engines import BACKENDS
from tests.tiny import write_checkpoint

SAID = Said("The capital of France is Paris.", "stop", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("parity"), "gemma3_text")


def test_every_front_answers_alike(mlxcel: Callable[..., Outcome], folder: Path) -> None:
    ended = mlxcel("parity", str(folder), "-n", "12", "--expect-identical", "--json")
    report = json.loads(ended.out)
    fronts = {one["arm"] for one in report["comparisons"]}
    paged = [front for front in fronts if "paged" in front]
    assert len(paged) == (3 if "paged" in BACKENDS else 0)
    assert len(fronts) == 7 + len(paged)
    assert len(report["comparisons"]) == (6 + len(paged)) * 4
    cached = {
        front: [one["cached_tokens"] for one in report["comparisons"] if one["arm"] == front] for front in fronts
    }
    assert cached["server, 1 slot"] == cached["server, 1 slot, cache miss"] == [0] * 4
    for hits in (front for front in fronts if front.endswith("cache hit")):
        assert all(tokens > 0 for tokens in cached[hits])
    assert report["identical"], [one for one in report["comparisons"] if not one["identical"]]
    assert ended.code == 0


def test_a_difference_is_shown_and_ends_with_1_where_none_is_expected(
    mlxcel: Callable[..., Outcome], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = parity._direct

    async def other(path: Path, asked: list[parity.Case]) -> list[Said]:
        first, *rest = await direct(path, asked)
        return [replace(first, text="?" + first.text), *rest]

    monkeypatch.setattr(parity, "_direct", other)
    monkeypatch.setattr(
        parity, "_served", lambda path, num_slots, *flags: parity._in_process("it", path, num_slots)
    )
    ended = mlxcel("parity", str(folder), "-n", "4", "--expect-identical")
    assert ended.code == 1
    num_fronts = 9 if "paged" in BACKENDS else 6
    assert ended.out.count("at character 0: ") == num_fronts
    assert ended.out.count("identical") == num_fronts * 3


@pytest.mark.parametrize(
    ("said", "difference"),
    [
        (SAID, ""),
        (replace(SAID, text="The capital of Spain"), "at character 15: 'France is Paris.' became 'Spain'"),
        (replace(SAID, text="The capital"), "at character 11: ' of France is Pa' became ''"),
        (replace(SAID, finish_reason="length"), "finish_reason: stop became length"),
        (replace(SAID, completion_tokens=9), "completion_tokens: 8 became 9"),
        (Said(error="it failed"), "it failed"),
    ],
)
def test_the_first_difference_is_named(said: Said, difference: str) -> None:
    assert first_difference(SAID, said) == difference


def test_greedy_and_seeded_with_penalties_on_text_and_chat() -> None:
    assert [case.name for case in cases(8)] == ["text, greedy", "chat, greedy", "text, seeded", "chat, seeded"]
    assert {"seed", "repetition_penalty", "frequency_penalty", "presence_penalty"} <= set(cases(8)[2].sampling)
