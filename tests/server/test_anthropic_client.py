"""The official client of Anthropic's dialect parses every object, on a port."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from engine.config import EngineConfig
from tests.replies import BROKEN_CALL, LONG, LONG_CALL
from tests.serving import Live, ScriptedSampler, WatchedEngine, live, tokens_of

ASKED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 10,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Live]:
    with live(tiny, ctx_size=512, temp=0.0) as server:
        yield server


@pytest.fixture
def client(server: Live) -> Iterator[anthropic.Anthropic]:
    with server.client() as http:
        yield anthropic.Anthropic(base_url=server.base_url, api_key="none", http_client=http, max_retries=0)


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_streamed_is_a_message_folded(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    Message.model_validate(whole.model_dump(), strict=True)
    assert not whole.model_extra
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 10)
    with client.messages.stream(**ASKED) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == text_of(final) == text_of(whole)
    assert final.stop_reason == whole.stop_reason
    counted = client.messages.count_tokens(**{name: ASKED[name] for name in ("model", "system", "messages")})
    for usage in (whole.usage, final.usage):
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    cut = client.messages.create(**ASKED | {"stop_sequences": [said[4:6], "never"]})
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", said[4:6])
    assert text_of(cut) == said[: said.index(said[4:6])]


def test_an_answer_that_is_begun_goes_on(client: anthropic.Anthropic) -> None:
    asked = ASKED | {"messages": [*ASKED["messages"], {"role": "assistant", "content": "Well"}]}
    whole = client.messages.create(**asked)
    Message.model_validate(whole.model_dump(), strict=True)
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
    counted = client.messages.count_tokens(**{name: asked[name] for name in ("model", "system", "messages")})
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    asked["messages"][-1]["content"] += " "
    with pytest.raises(anthropic.BadRequestError, match="white space"):
        client.messages.create(**asked)


def test_errors_come_as_the_clients_types(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="served: tiny"):
        client.messages.create(**ASKED | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="tokens and the context holds 512"):
        client.messages.create(**ASKED | {"system": "x" * 1000})
    with pytest.raises(anthropic.BadRequestError, match="temprature") as field:
        client.messages.create(**ASKED, extra_body={"temprature": 1})
    assert field.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": str(field.value.body["error"]["message"])},  # type: ignore[index]
    }


def test_a_call_that_breaks_while_it_is_told(tiny: Path) -> None:
    """The client reads arguments as they come, and gives up on what is no beginning of JSON."""
    tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
    sampler = ScriptedSampler({0: tokens_of(f"{LONG_CALL}{BROKEN_CALL}")})

    def engine(config: EngineConfig) -> WatchedEngine:
        return WatchedEngine(config, sampler=sampler)

    with live(tiny, open_engine=engine, seed=0) as server, server.client() as http:
        client = anthropic.Anthropic(base_url=server.base_url, api_key="none", http_client=http, max_retries=0)
        asked = ASKED | {"tools": tools, "max_tokens": 1000}
        with client.messages.stream(**asked) as stream:
            told = [event.snapshot for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        whole = client.messages.create(**asked)
    assert len(told) > 100
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"a": LONG}, {}]
    assert [block.input for block in whole.content if block.type == "tool_use"] == [{"a": LONG}, {}]
    assert text_of(final) == text_of(whole) == 'd"}}\n'
    assert final.stop_reason == "tool_use"


def test_an_error_in_a_stream_comes_as_the_clients_type(tiny: Path) -> None:
    sampler = ScriptedSampler({0: [*tokens_of("Hel"), ValueError("broken")]})

    def engine(config: EngineConfig) -> WatchedEngine:
        return WatchedEngine(config, sampler=sampler)

    with live(tiny, open_engine=engine, seed=0) as server, server.client() as http:
        client = anthropic.Anthropic(base_url=server.base_url, api_key="none", http_client=http, max_retries=0)
        said: list[str] = []
        with client.messages.stream(**ASKED) as stream, pytest.raises(anthropic.APIStatusError) as failed:
            said.extend(stream.text_stream)
    assert "".join(said) == "Hel"
    assert isinstance(failed.value.body, dict)
    assert failed.value.body["error"]["type"] == "api_error"
