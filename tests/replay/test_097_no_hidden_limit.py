"""Case 97: answers stop at a hidden limit. They run to their end or the context's, and a cut is said.

With a real model in this process, through the program's own entry.
"""

import re

import pytest

from tests.tiny import write_checkpoint

CONTEXT = 300
SAMPLED = ["--temp", "1", "--seed", "3"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("command", ["run", "chat", "generate"])
def test_without_a_limit_an_answer_runs_to_its_end_or_the_contexts(command, tiny, mlxcel, capsys):
    assert mlxcel(command, tiny, "-c", str(CONTEXT), "--stats", stdin=b"hi") == 0
    said = capsys.readouterr().err
    prompt, new = (int(re.search(rf"{what}: (\d+) tokens", said)[1]) for what in ("prompt", "new"))
    assert new > 100
    assert prompt + new == CONTEXT
    assert f"(cut at {new} tokens: the context is full" in said


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_an_answer_that_a_limit_cuts_says_so(limit, tiny, mlxcel, capsys):
    assert mlxcel("run", tiny, "-p", "hi", "-n", str(limit), *SAMPLED) == 0
    assert f"by --max-tokens {limit}" in capsys.readouterr().err
