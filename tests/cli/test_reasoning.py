"""Reasoning on the terminal: hidden as part of the waiting, or shown apart from the answer."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from mlxcel_cli import answer
from mlxcel_cli.client import _pieces
from mlxcel_cli.pieces import End, Piece, Reasoning, Text
from mlxcel_cli.view import View


async def given(*pieces: Piece) -> AsyncGenerator[Piece, None]:
    for piece in (*pieces, End("stop")):
        yield piece


def shown(*pieces: Piece, reasoning: str) -> answer.Answer:
    return asyncio.run(answer.show(given(*pieces), View(reasoning)))


def test_reasoning_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(Reasoning("I "), Reasoning("plan."), Text("Hello"), reasoning="hide")
    answer.remark(said, None, by="", with_stats=False)
    assert capsys.readouterr() == ("Hello\n", "")


def test_reasoning_is_shown_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    shown(Reasoning("I "), Reasoning("plan."), Text("Hello"), reasoning="show")
    assert capsys.readouterr() == ("Hello\n", "I plan.\n\n")


def test_nothing_but_reasoning_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    answer.remark(shown(Reasoning("I plan."), reasoning="hide"), None, by="", with_stats=False)
    assert capsys.readouterr() == ("", f"(nothing but reasoning came; {answer.HOW_TO_SEE})\n")
    answer.remark(shown(Reasoning("I plan."), reasoning="show"), None, by="", with_stats=False)
    assert capsys.readouterr() == ("", "I plan.\n\n")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_has_two_names_on_the_wire(name: str) -> None:
    async def read() -> list[Piece]:
        async def chunks() -> AsyncGenerator[bytes, None]:
            yield b'data: {"choices": [{"delta": {"%s": "I plan."}}]}\n\n' % name.encode()
            yield b"data: [DONE]\n\n"

        return [piece async for piece in _pieces(chunks())]

    assert asyncio.run(read()) == [Reasoning("I plan."), End("")]
