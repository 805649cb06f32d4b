"""Messages from a pipe or a file."""

import asyncio
import os
import signal

import pytest

from engine.errors import UserError
from mlxcel_cli.lines import Piped, is_open, unquoted

pytestmark = pytest.mark.anyio


async def read_all(lines: Piped) -> list[str]:
    messages = []
    while (message := await lines.read()) is not None:
        messages.append(message)
    return messages


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        (b"", []),
        (b"one", ["one"]),
        (b"one\ntwo\r\n", ["one", "two"]),
        (b'one\n"""two\nthree"""\nfour\n', ["one", "two\nthree", "four"]),
        (b'"""\none\n"""\n', ["one"]),
        (b'"""never\nclosed\n', ["never\nclosed"]),
        (b'"""\n', [""]),
        ("né\U0001f600\n".encode(), ["né\U0001f600"]),
    ],
)
async def test_a_file_or_pipe_is_read_to_its_end(content, messages, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with open(path) as file:
        assert await read_all(Piped(file.fileno())) == messages
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    assert await read_all(Piped(reader)) == messages
    os.close(reader)


@pytest.mark.parametrize(("content", "num_ends"), [(b"", 1), (b"one\n", 1), (b"one", 2)])
async def test_who_asks_ends_the_lines_that_do_not_end_themselves(content, num_ends, tmp_path):
    (tmp_path / "file").write_bytes(content)
    said: list[str] = []
    with open(tmp_path / "file") as file:
        await read_all(Piped(file.fileno(), said.append))
    assert said.count("\n") == num_ends
    assert said[-2:] == [">>> ", "\n"]


async def test_a_line_is_given_before_the_next_one_is_there():
    reader, writer = os.pipe()
    lines = Piped(reader)
    os.write(writer, b"one\ntw")
    assert await lines.read() == "one"
    second = asyncio.ensure_future(lines.read())
    os.write(writer, b"o\n")
    assert await second == "two"
    os.close(writer)
    assert await lines.read() is None
    os.close(reader)


async def test_a_wait_for_a_line_can_be_cancelled():
    reader, writer = os.pipe()
    waiting = asyncio.ensure_future(Piped(reader).read())
    await asyncio.wait({waiting}, timeout=0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    os.close(writer)
    os.close(reader)


async def test_ctrl_c_where_somebody_types_asks_anew():
    reader, writer = os.pipe()
    said: list[str] = []
    waiting = asyncio.ensure_future(Piped(reader, said.append).read())
    while not said:
        await asyncio.sleep(0)
    signal.raise_signal(signal.SIGINT)
    while len(said) < 2:
        await asyncio.sleep(0)
    os.write(writer, b"one\n")
    assert await waiting == "one"
    assert said == [">>> ", "\n>>> "]
    os.close(writer)
    os.close(reader)


async def test_the_null_device_has_no_lines():
    with open(os.devnull) as null:
        assert await read_all(Piped(null.fileno())) == []


async def test_bytes_that_are_no_text_are_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"ab\xff\n")
    with open(path) as file, pytest.raises(UserError, match="byte 0xff at 2"):
        await Piped(file.fileno()).read()


@pytest.mark.parametrize("text", ['"""', '""""', '"""a', '  """a\nb', '"""""'])
async def test_quotes_that_are_open(text):
    assert is_open(text)


@pytest.mark.parametrize("text", ["", "a", 'a"""', '""', '""""""', '"""a"""', '"""a\nb""" '])
async def test_quotes_that_are_not_open(text):
    assert not is_open(text)


async def test_only_the_quotes_around_a_message_go():
    assert unquoted('"""a """ b"""') == 'a """ b'
    assert unquoted(' a "quoted" ') == ' a "quoted" '
