"""A router and its nodes as processes: what they answer is what one process answers."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.bench.killing import answers, rounds, strike
from tests.cluster import Cluster, Node, cluster, streamed, until
from tests.serving import CHAT, COMPLETIONS
from tests.tiny import write_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NUMBERS = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "integer", "maximum": 9}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0, **more}


BODIES = {
    "greedy": said("one"),
    "seeded": said("two", temperature=1.2, seed=7, top_p=0.9),
    "penalties": said("three", temperature=1, seed=8, repetition_penalty=1.3, dry_multiplier=1.0),
    "mirostat": said("four", temperature=1, seed=9, mirostat=2),
    "logprobs": said("five", temperature=1, seed=10, logprobs=True, top_logprobs=3),
    "schema": said("six", temperature=1, seed=11, max_tokens=90, response_format={
        "type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA},
    }),
    "tools": said("seven", temperature=1, seed=12, max_tokens=120, tools=[ADD], tool_choice="required"),
    "long": said("eight " * 150, max_tokens=40),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def together(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with cluster(model, tmp_path_factory.mktemp("cluster")) as one:
        yield one


@contextmanager
def one_process(model: Path, folder: Path) -> Iterator[httpx2.Client]:
    """A client of a process that does it all."""
    node = Node("alone", [str(model)], folder)
    node.start()
    try:
        until(node.healthy, "the server")
        with httpx2.Client(base_url=node.url, timeout=60) as client:
            yield client
    finally:
        node.kill()


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with one_process(model, tmp_path_factory.mktemp("alone")) as client:
        yield client


def answers_of(alone: httpx2.Client, bodies: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`bodies`, and one that a stop string ends, and what one process answers to each."""
    expected = {name: streamed(alone, CHAT, body) for name, body in bodies.items()}
    bodies = {**bodies, "stops": {**bodies["greedy"], "stop": [expected["greedy"]["text"][3:6]]}}
    expected["stops"] = streamed(alone, CHAT, bodies["stops"])
    assert expected["stops"]["reason"] == "stop"
    assert all(answer["done"] for answer in expected.values())
    assert expected["tools"]["calls"]
    return bodies, expected


def assert_answers(together: Cluster, bodies: dict[str, Any], expected: dict[str, Any], *, times: int) -> None:
    """Each kind of request, one by one and eight at once, is answered as it is to be; and nothing is left."""
    for name, body in bodies.items():
        assert streamed(together.client, CHAT, body) == expected[name], name
    stats = together.stats()
    assert stats["metrics"]["handed_over"] >= len(bodies)
    assert stats["metrics"]["rerouted_requests"] == 0
    with ThreadPoolExecutor(8) as clients:
        names = [*bodies] * times
        answers = clients.map(lambda name: streamed(together.client, CHAT, bodies[name]), names)
        for name, answer in zip(names, answers, strict=True):
            assert answer == expected[name], name
    for name in together.nodes:
        until(lambda name=name: together.idle(name), f"{name} idle")


def test_every_kind_of_request_is_answered_as_by_one_process(together: Cluster, alone: httpx2.Client) -> None:
    assert_answers(together, *answers_of(alone, BODIES), times=3)


@pytest.mark.real
def test_a_real_model_is_served_as_by_one_process(real_checkpoint: Path, tmp_path: Path) -> None:
    kinds = ("greedy", "seeded", "logprobs", "schema", "tools")
    bodies = {kind: {**BODIES[kind], "max_tokens": min(BODIES[kind]["max_tokens"], 32)} for kind in kinds}
    bodies["tools"] = said("add two numbers", tools=[NUMBERS], tool_choice="required", max_tokens=48)
    with one_process(real_checkpoint, tmp_path) as alone:
        bodies, expected = answers_of(alone, bodies)
    with cluster(real_checkpoint, tmp_path / "cluster") as together:
        assert_answers(together, bodies, expected, times=1)


def test_a_conversation_goes_where_its_prefix_is(together: Cluster) -> None:
    before = together.stats()
    body = said("a question that is a good deal longer than a block of tokens, and then some more of it")
    first = together.client.post(CHAT, json=body).json()
    for _ in range(3):
        messages = [*body["messages"], first["choices"][0]["message"], {"role": "user", "content": "go on"}]
        again = together.client.post(CHAT, json={**body, "messages": messages}).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    after = together.stats()
    assert after["prefill_hits"] >= before["prefill_hits"] + 3
    assert after["decode_hits"] >= before["decode_hits"] + 3


def test_usage_and_timings_are_of_the_whole_request(together: Cluster, alone: httpx2.Client) -> None:
    body = {"prompt": "how far is it from here to there and back again", "max_tokens": 9, "temperature": 0}
    ours, theirs = (client.post(COMPLETIONS, json=body).json() for client in (together.client, alone))
    assert ours["choices"][0]["text"] == theirs["choices"][0]["text"]
    assert ours["usage"] == theirs["usage"]
    assert ours["timings"]["prompt_n"] == theirs["timings"]["prompt_n"]
    assert ours["timings"]["predicted_n"] == 9
    assert ours["timings"]["prompt_ms"] > 0
    assert ours["timings"]["predicted_ms"] > 0


def test_bad_requests_are_refused_as_by_one_process(together: Cluster, alone: httpx2.Client) -> None:
    for body in (
        said("x" * 5000),
        said("a", response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": 3}}}),
        said("a", no_such_field=1),
        said("a", logit_bias={"100000": 1}),
    ):
        ours, theirs = (client.post(CHAT, json=body) for client in (together.client, alone))
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
        assert ours.status_code == 400


def test_whoever_is_killed_under_load_no_answer_is_wrong_and_nothing_is_left(together: Cluster) -> None:
    outcomes = rounds(together, 3, seed=1)
    assert outcomes["killed prefill"] == outcomes["killed decode"] == outcomes["killed router"] == 1


def test_a_node_that_is_told_to_stop_costs_nobody_a_token(together: Cluster) -> None:
    outcomes = strike(together, answers(together), "decode-1", 0.3, signal.SIGTERM)
    assert outcomes["right"] >= 8
    assert together.nodes["decode-1"].codes == [0]
