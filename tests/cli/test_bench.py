"""`mlxcel bench` on a tiny model, and `mlxcel bench serve` on a server double: tables, JSON and page."""

import json
import math
import re
import socket
from collections.abc import AsyncIterator, Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from mlxcel_cli.bench.sparkline import BARS
from tests.cli.conftest import Outcome
from tests.cli.double import Double, Refusal
from tests.tiny import write_checkpoint

Mlxcel = Callable[..., Outcome]
SPEED = ("--prompts", "8,40", "--batches", "1,2", "-n", "6", "--repeats", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bench"), "llama")


class Page(HTMLParser):
    """What a page would fetch, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]


def page_of(file: Path) -> Page:
    text = file.read_text("utf-8")
    page = Page(text)
    assert not page.fetched
    assert not {"script", "link", "img"} & set(page.tags)
    assert "url(" not in text
    assert "default-src 'none'" in text
    return page


def test_a_model_is_measured_at_every_size(mlxcel: Mlxcel, folder: Path, tmp_path: Path) -> None:
    html = tmp_path / "speed.html"
    ended = mlxcel("bench", str(folder), *SPEED, "--json", "--html", str(html))
    assert ended.code == 0, ended.err
    body = json.loads(ended.out)
    assert body["kind"] == "speed"
    assert [(p["prompt_tokens"], p["batch"]) for p in body["points"]] == [(8, 1), (8, 2), (40, 1), (40, 2)]
    for point in body["points"]:
        for name in ("prefill", "decode"):
            rates = point[name]
            assert len(rates["repeats"]) == 2
            assert 0 < rates["least"] <= rates["tokens_per_s"] <= rates["largest"]
    assert any(note.startswith("kernels: ") for note in body["notes"])
    assert page_of(html).tags.count("svg") >= 3


def test_the_table_has_a_line_for_each_size(mlxcel: Mlxcel, folder: Path) -> None:
    ended = mlxcel("bench", str(folder), *SPEED, "--warmup", "0")
    assert ended.code == 0, ended.err
    lines = [line.split() for line in ended.out.splitlines()]
    assert [line[:2] for line in lines if line and line[0] in ("8", "40")] == [
        ["8", "1"],
        ["8", "2"],
        ["40", "1"],
        ["40", "2"],
    ]
    assert "\x1b" not in ended.out


def test_what_does_not_fit_the_context_is_refused(mlxcel: Mlxcel, folder: Path) -> None:
    ended = mlxcel("bench", str(folder), "--prompts", "5000", "-n", "4")
    assert ended.code == 1
    assert "prompt and new tokens are 5004, and the context is 4096" in ended.err


def test_a_server_is_loaded(mlxcel: Mlxcel, address: str, double: Double, tmp_path: Path) -> None:
    html = tmp_path / "serve.html"
    asked = ("--clients", "3", "--requests", "7", "-n", "5", "--seed", "0", "--slo", "ttft=9,itl=9")
    ended = mlxcel("bench", "serve", "--url", address, *asked, "--json", "--html", str(html))
    assert ended.code == 0, ended.err
    body = json.loads(ended.out)
    (server,) = body["servers"]
    (run,) = server["runs"]
    assert (server["model"], run["num_requests"], run["num_failed"]) == ("double", 7, 0)
    assert (run["prompt_tokens"], run["completion_tokens"], run["counted_by"]) == (28, 14, "server")
    assert run["good_share"] == 1.0
    assert (body["asked"]["seed"], body["asked"]["mix"]) == (0, "chat")
    assert len(double.asked) == 8  # one to warm up
    _, sent = double.asked[-1]
    assert (sent["model"], sent["max_tokens"], sent["stream"], sent["temperature"]) == ("double", 5, True, 0)
    assert "ignore_eos" not in sent
    assert page_of(html).tags.count("svg") >= 5


def test_two_servers_are_loaded_in_turn_with_the_same_texts(mlxcel: Mlxcel, address: str, double: Double) -> None:
    asked = ("--clients", "1", "--requests", "2", "--repeats", "2", "--warmup", "0", "--json")
    ended = mlxcel(
        "bench", "serve", "--url", address, "--against", f"{address}/v1", "--against-model", "other", *asked
    )
    assert ended.code == 0, ended.err
    body = json.loads(ended.out)
    assert [len(server["runs"]) for server in body["servers"]] == [2, 2]
    assert set(body["ratios"]["ttft_s p50"]) == {"median", "least", "largest"}
    sent = [(one["model"], one["messages"]) for _, one in double.asked]
    assert [model for model, _ in sent] == ["double"] * 2 + ["other"] * 4 + ["double"] * 2
    texts = [messages for _, messages in sent]
    assert texts[0:2] == texts[2:4] != texts[4:6] == texts[6:8]


def test_the_table_says_what_failed_and_by_whom_tokens_are_counted(
    mlxcel: Mlxcel, address: str, double: Double
) -> None:
    answers: list[Any] = [["a", "b"], Refusal(503, "full"), ["c"], Refusal(400, "no")]
    double.answer = lambda body: answers[(len(double.asked) - 1) % len(answers)]
    ended = mlxcel("bench", "serve", "--url", address, "--rate", "1000", "--requests", "4", "--warmup", "0")
    assert ended.code == 0, ended.err
    failed = re.search(r"2 failed: (.*)", ended.out)
    assert failed
    assert set(failed[1].split(", ")) == {"busy (503): 1", "refused (400): 1"}
    assert "first token" in ended.out
    assert any(bar in ended.out for bar in BARS)


@pytest.fixture
def unlisted(double: Double) -> None:
    """The double lists no models."""

    async def broken(request: Request) -> Response:
        return PlainTextResponse("no list today")

    double.models = broken  # type: ignore[method-assign]


@pytest.mark.usefixtures("unlisted")
def test_of_a_server_that_lists_no_models_the_model_must_be_named(
    mlxcel: Mlxcel, address: str, double: Double
) -> None:
    asked = ("bench", "serve", "--url", address, "--requests", "2", "--warmup", "0", "--json")
    ended = mlxcel(*asked)
    assert ended.code == 1
    assert f"{address} lists no model: the server sent what no answer is: no JSON\nhint: --model" in ended.err
    assert not double.asked
    ended = mlxcel(*asked, "--model", "mine")
    assert ended.code == 0, ended.err
    assert double.asked[0][1]["model"] == "mine"


@pytest.mark.parametrize(
    "listed", [3, [], None, [{"id": None}], [{"id": ""}], ["double"], {"id": "double"}], ids=str
)
def test_a_listing_that_names_no_model_is_said(
    mlxcel: Mlxcel, address: str, double: Double, listed: object
) -> None:
    double.listed = listed
    ended = mlxcel("bench", "serve", "--url", address)
    assert ended.code == 1
    assert f"{address} lists no model" in ended.err


@pytest.fixture
def refused(double: Double, request: pytest.FixtureRequest) -> None:
    """The double refuses to list its models, with this status and these headers."""
    status, headers = request.param

    async def refusing(request: Request) -> Response:
        return JSONResponse({"error": {"message": "slow down"}}, status, headers=headers)

    double.models = refusing  # type: ignore[method-assign]


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("refused", [(429, {}), (302, {"location": "http://else"})], indirect=True, ids=str)
def test_why_a_server_does_not_list_its_models_is_said(mlxcel: Mlxcel, address: str) -> None:
    ended = mlxcel("bench", "serve", "--url", address)
    assert ended.code == 1
    assert f"error: {address} lists no model: slow down" in ended.err
    assert "hint: --model" in ended.err


def test_an_answer_that_is_none_is_an_error_of_its_request_alone(
    mlxcel: Mlxcel, address: str, double: Double
) -> None:
    frames = double.frames

    async def odd(path: str, pieces: Any) -> AsyncIterator[str]:
        if len(double.asked) % 2:
            yield 'data: {"choices": 5}\n\n'
        async for frame in frames(path, pieces):
            yield frame

    double.frames = odd  # type: ignore[method-assign]
    asked = ("--clients", "1", "--requests", "4", "--warmup", "0")
    ended = mlxcel("bench", "serve", "--url", address, *asked)
    assert ended.code == 0, ended.err
    assert "2 failed: no answer of this API: 2" in ended.out


def test_a_password_in_a_url_is_nowhere_in_what_is_said(mlxcel: Mlxcel, address: str, tmp_path: Path) -> None:
    html = tmp_path / "serve.html"
    url = address.replace("://", "://me:PASSWORD@")
    asked = (
        "bench",
        "serve",
        "--url",
        url,
        "--against",
        url,
        "--requests",
        "1",
        "--warmup",
        "1",
        "--html",
        str(html),
    )
    for ended in (mlxcel(*asked), mlxcel(*asked, "--json")):
        assert ended.code == 0, ended.err
        assert "PASSWORD" not in ended.out + ended.err + html.read_text("utf-8")
        assert "http://***@127.0.0.1" in ended.out


def test_the_timeout_holds_for_the_listing_of_models(mlxcel: Mlxcel, double: Double) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ended = mlxcel("bench", "serve", "--url", url, "--timeout", "0.05")
    assert ended.code == 1
    assert f"{url} did not list its models within 0.05 s" in ended.err
    assert "hint: --model" in ended.err


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": math.nan, "completion_tokens": math.inf, "prompt_tokens_details": {"cached_tokens": -1}},
        {"prompt_tokens": "4", "completion_tokens": [2], "prompt_tokens_details": 3},
        {"completion_tokens": 10**400},
        [1],
        "many",
    ],
    ids=str,
)
def test_usage_that_is_no_count_is_as_if_not_sent(
    mlxcel: Mlxcel, address: str, double: Double, usage: object
) -> None:
    double.usage = usage
    ended = mlxcel("bench", "serve", "--url", address, "--requests", "2", "--warmup", "0", "--json")
    assert ended.code == 0, ended.err
    (run,) = json.loads(ended.out)["servers"][0]["runs"]
    assert (run["num_failed"], run["counted_by"]) == (0, "pieces")
    assert (run["prompt_tokens"], run["cached_tokens"], run["completion_tokens"]) == (0, 0, 4)


@pytest.mark.parametrize("place", ["missing/serve.html", "folder"])
def test_a_page_that_cannot_be_written_is_refused_before_the_run(
    mlxcel: Mlxcel, address: str, double: Double, tmp_path: Path, place: str
) -> None:
    (tmp_path / "folder").mkdir()
    ended = mlxcel("bench", "serve", "--url", address, "--html", str(tmp_path / place))
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: --html: ")
    assert not double.asked


def test_what_a_server_calls_its_model_moves_no_cursor(
    mlxcel: Mlxcel, address: str, double: Double, tmp_path: Path
) -> None:
    html = tmp_path / "serve.html"
    double.listed = [{"id": "a\x1b]0;title\x07\x9bb"}]
    ended = mlxcel(
        "bench", "serve", "--url", address, "--requests", "1", "--warmup", "0", "--html", str(html), "--seed", "1"
    )
    assert ended.code == 0, ended.err
    for text in (ended.out, ended.err, html.read_text("utf-8")):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert r"a\x1b]0;title\x07\x9bb" in ended.out
    assert r"a\x1b]0;title\x07\x9bb" in html.read_text("utf-8")


def test_one_repeat_has_no_range_and_the_output_ends_with_its_last_line(
    mlxcel: Mlxcel, address: str, folder: Path, tmp_path: Path
) -> None:
    html = tmp_path / "it.html"
    speed = mlxcel("bench", str(folder), *SPEED[:-1], "1", "--warmup", "0", "--html", str(html))
    load = mlxcel("bench", "serve", "--url", address, "--against", address, "--requests", "2", "--warmup", "0")
    for ended in (speed, load):
        assert ended.code == 0, ended.err
        assert " to " not in ended.out
        assert "least" not in ended.out
        assert ended.out.endswith("\n")
        assert not ended.out.endswith("\n\n")
    assert "least" not in html.read_text("utf-8")
    assert load.out.count("\n\n") == 2


def test_a_server_that_answers_nothing_ends_with_1(mlxcel: Mlxcel, address: str, double: Double) -> None:
    double.answer = lambda body: Refusal(400, "never")
    ended = mlxcel("bench", "serve", "--url", address, "--requests", "2", "--warmup", "0")
    assert ended.code == 1
    assert "2 failed: refused (400): 2" in ended.out


def test_nobody_there_is_an_error_with_a_hint(mlxcel: Mlxcel, tmp_path: Path) -> None:
    ended = mlxcel("bench", "serve", "--url", str(tmp_path / "no.sock"))
    assert ended.code == 1
    assert "no server answers" in ended.err
    assert "hint: " in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--prompts", "8"], "--prompts belongs to mlxcel bench MODEL"),
        (["serve", "--threads", "1"], "--threads belongs to mlxcel bench MODEL"),
        (["tiny", "--clients", "2"], "--clients belongs to mlxcel bench serve"),
        (["tiny", "--words", "0"], "--words belongs to mlxcel bench serve"),
        (["serve", "--clients", "2", "--rate", "1"], "give one of them"),
        (["serve", "--rate", "0"], "--rate is a number of conversations a second"),
        (["serve", "--against-key", "k"], "there is no --against"),
        (["tiny", "--batches", "1,x"], "--batches takes whole numbers"),
        (["tiny", "--prompts", "0"], "--prompts takes whole numbers"),
        (["tiny", "--prompts", "9" * 5000], "--prompts takes whole numbers"),
        (["tiny", "--batches", "5000"], "--batches takes whole numbers from 1 to 4096"),
        (["serve", "--rate", "nan"], "--rate is a number of conversations a second"),
        (["serve", "--rate", "1e-9"], "--rate is a number of conversations a second from 0.001"),
        (["serve", "--rate", "1e9"], "--rate is a number of conversations a second"),
        (["serve", "--timeout", "nan"], "'--timeout'"),
        (["serve", "--timeout", "1e99"], "'--timeout'"),
        (["serve", "--requests", "100000000"], "--requests"),
        (["serve", "--words", "100000000"], "--words"),
        (["serve", "--clients", "100000000"], "--clients"),
        (["serve", "--repeats", "100000000"], "--repeats"),
        (["serve", "--warmup", "100000000"], "--warmup"),
        (["serve", "-n", "100000000"], "-n"),
        (["serve", "--requests", "1000", "--words", "1000000"], "--requests and --words are more than"),
        (["serve", "--slo", "x=1"], "--slo: 'x=1' is no objective"),
        (["serve", "--slo", "ttft=nan"], "--slo: 'ttft=nan' is no objective"),
        (["serve", "--slo", "ttft=1,ttft=2"], "--slo: 'ttft=2' is a second bound of ttft"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_by_name(mlxcel: Mlxcel, arguments: list[str], said: str) -> None:
    ended = mlxcel("bench", *arguments)
    assert ended.code == 2
    assert said in ended.err
