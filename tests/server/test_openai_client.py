"""The official client of the OpenAI dialect parses every object, on a port and on a unix socket."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseIncompleteEvent

from tests.serving import Live, live
from tests.tiny import byte_tokenizer

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 10, "temperature": 0}
OPTIONS = {"include_usage": True}


def messages(i: int = 0) -> Any:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"question {i}"}]


def text_of(prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else byte_tokenizer().decode(prompt)


@pytest.fixture(scope="module", params=["port", "unix"])
def server(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    host = "127.0.0.1" if request.param == "port" else str(tmp_path_factory.mktemp("run") / "m.sock")
    with live(tiny, host, ctx_size=512) as server:
        yield server


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with server.client() as http:
        yield openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", http_client=http, max_retries=0)


def strict(answer: Any) -> None:
    """Every field is one that the client's types know, with a value that they accept."""
    told = answer.model_dump()
    if answer.object == "text_completion":
        for choice in told["choices"]:
            choice["finish_reason"] = (
                choice["finish_reason"] or "stop"
            )  # null until the end, which the type forgets
    type(answer).model_validate(told, strict=True)
    allowed = {"timings"}
    assert set(answer.model_extra or ()) <= allowed


def test_chat_streamed_is_chat_folded(client: openai.OpenAI) -> None:
    for more in ({}, {"n": 2, "temperature": 1, "seed": 5}, {"stop": ["e"]}):
        asked = ASKED | more | {"extra_body": {"cache_prompt": False}}
        whole = client.chat.completions.create(messages=messages(), **asked)
        assert isinstance(whole, ChatCompletion)
        strict(whole)
        texts = [""] * len(whole.choices)
        reasons: list[str | None] = [None] * len(whole.choices)
        usage = None
        with client.chat.completions.create(
            messages=messages(), stream=True, stream_options=OPTIONS, **asked
        ) as stream:
            for chunk in stream:
                assert isinstance(chunk, ChatCompletionChunk)
                strict(chunk)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert texts == [choice.message.content for choice in whole.choices]
        assert reasons == [choice.finish_reason for choice in whole.choices]
        assert usage == whole.usage
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        if not more:
            assert whole.usage.completion_tokens == 10
            assert reasons == ["length"]
        if "n" in more:
            assert len(texts) == 2
            assert texts[0] != texts[1]


def test_completions_streamed_are_completions_folded(client: openai.OpenAI) -> None:
    prompts: tuple[Any, ...] = ("once", ["once", "twice"], [1, 2, 3], [[1, 2], [3]])
    for prompt, echo in itertools.product(prompts, (False, True)):
        asked = ASKED | {"echo": echo, "n": 2, "seed": 3, "temperature": 1}
        whole = client.completions.create(prompt=prompt, **asked)
        assert isinstance(whole, Completion)
        strict(whole)
        texts = [""] * len(whole.choices)
        usage = None
        for chunk in client.completions.create(prompt=prompt, stream=True, stream_options=OPTIONS, **asked):
            strict(chunk)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [choice.text for choice in whole.choices]
        assert usage == whole.usage
        if echo:
            plain = client.completions.create(prompt=prompt, **asked | {"echo": False})
            many = isinstance(prompt, list) and not isinstance(prompt[0], int)
            before = [text_of(one) for one in (prompt if many else [prompt]) for _ in range(2)]
            assert texts == [text + choice.text for text, choice in zip(before, plain.choices, strict=True)]


def test_an_answer_that_is_begun_goes_on(client: openai.OpenAI) -> None:
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    turns = [*messages(), {"role": "assistant", "content": "Well"}]
    whole = client.chat.completions.create(messages=turns, extra_body=go_on, **ASKED)
    strict(whole)
    chunks = client.chat.completions.create(messages=turns, extra_body=go_on, stream=True, **ASKED)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content


def test_a_tool_that_is_allowed_has_to_be_called(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("a", "b")]
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = client.chat.completions.create(
        messages=messages(),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        **ASKED | {"max_tokens": 200},
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["b"]  # type: ignore[union-attr]
    flat: Any = [{"type": "function", "name": tool["function"]["name"], "parameters": schema} for tool in tools]
    response = client.responses.create(
        model="tiny",
        input="hi",
        tools=flat,
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]},
        parallel_tool_calls=False,
        temperature=0,
    )
    Response.model_validate(response.model_dump(), strict=True)
    assert [item.name for item in response.output if item.type == "function_call"] == ["b"]


def test_the_clients_own_fold(client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(messages=messages(), **ASKED).choices[0].message.content
    assert cut
    asked = ASKED | {"stop": cut[len(cut) // 2]}  # this fold raises on a length
    whole = client.chat.completions.create(messages=messages(), **asked)
    with client.chat.completions.stream(messages=messages(), **asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_responses_streamed_are_responses_folded(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_output_tokens": 10, "temperature": 0}
    whole = client.responses.create(input="hi", instructions="Be brief.", **asked)
    Response.model_validate(whole.model_dump(), strict=True)
    assert not whole.model_extra
    with client.responses.stream(input="hi", instructions="Be brief.", **asked) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"
    items: Any = messages()
    created = client.responses.create(input=items, stream=True, **asked)
    final = list(created)[-1]
    assert isinstance(final, ResponseIncompleteEvent)
    assert final.response.output_text == client.responses.create(input=items, **asked).output_text
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    more = client.responses.create(input="and?", previous_response_id=whole.id, **asked)
    assert more.usage
    assert whole.usage
    assert more.usage.input_tokens > whole.usage.input_tokens
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(input="and?", previous_response_id=whole.id, **asked)
    assert (gone.value.code, gone.value.param) == ("response_not_found", "previous_response_id")
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(input="x" * 1000, **asked)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")


def test_a_response_is_parsed_into_the_type_it_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="tiny", input="hi", text_format=Animal, max_output_tokens=300)
    assert isinstance(answer.output_parsed, Animal)


def test_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    """The client asks for base64 where nobody says, and reads it."""
    texts = ["one", "another text"]
    asked = client.embeddings.create(model="tiny", input=texts)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [entry.embedding for entry in asked.data] == [entry.embedding for entry in plain.data]
    assert [len(entry.embedding) for entry in plain.data] == [32, 32]
    strict(plain)
    short = client.embeddings.create(model="tiny", input=texts, dimensions=8, extra_body={"pooling": "mean"})
    assert [len(entry.embedding) for entry in short.data] == [8, 8]


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list()
    assert model.id == "tiny"
    assert client.models.retrieve("tiny") == model


def test_errors_come_as_the_clients_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="served: tiny") as unknown:
        client.chat.completions.create(messages=messages(), model="gpt-4")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="1000 tokens") as long:
        client.completions.create(prompt="x" * 1000, **ASKED)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as field:
        client.chat.completions.create(messages=messages(), extra_body={"temprature": 1}, **ASKED)
    assert field.value.param == "temprature"


async def test_eight_clients_at_once_answer_as_alone(server: Live) -> None:
    async def ask(i: int, streamed: bool) -> str:
        async with server.async_client() as http:
            client = openai.AsyncOpenAI(
                base_url=f"{server.base_url}/v1", api_key="none", http_client=http, max_retries=0
            )
            if not streamed:
                whole = await client.chat.completions.create(messages=messages(i), **ASKED)
                return whole.choices[0].message.content or ""
            stream = await client.chat.completions.create(messages=messages(i), stream=True, **ASKED)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    alone = [await ask(i, streamed=False) for i in range(8)]
    assert len(set(alone)) > 1
    for streamed in (True, False):
        assert await asyncio.gather(*(ask(i, streamed) for i in range(8))) == alone


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = pydantic.Field(ge=0, le=9)
    parents: list[Literal["a", "b"]] = pydantic.Field(max_length=2)


def test_an_answer_is_parsed_into_the_type_it_was_asked_for(client: openai.OpenAI) -> None:
    asked = ASKED | {"max_tokens": 200, "temperature": 1, "seed": 3}
    answer = client.chat.completions.parse(messages=messages(), response_format=Animal, **asked)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Animal)
