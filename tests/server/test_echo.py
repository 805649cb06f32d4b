"""The echo store: reasoning comes back for its own conversation alone, within its bounds."""

from pathlib import Path
from typing import Any

import pytest

from server.echo import Echo
from tests.replies import HI, script
from tests.serving import CHAT, served
from tests.templates import THINKING, checkpoint

ASKED = [{"role": "user", "content": "hi"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "Hello"}]
SCOPE = ("model", "template", "salt")


def echoed(store: Echo, messages: Any, scope: Any = SCOPE) -> list[Any]:
    return [message.get("reasoning_content") for message in store.filled(scope, messages)]


def test_reasoning_comes_back_for_its_own_turn_alone() -> None:
    store = Echo()
    store.keep(SCOPE, ASKED, "Hello", "I greet.")
    again = [*ANSWERED, {"role": "user", "content": "so"}]
    assert echoed(store, again) == [None, "I greet.", None]
    assert echoed(store, [{**ASKED[0], "content": "ho"}, *again[1:]]) == [None] * 3
    assert echoed(store, [*ASKED, {"role": "assistant", "content": "Hi"}]) == [None] * 2
    for scope in (("model", "template", ""), ("other", *SCOPE[1:]), ("model", "templatesalt")):
        assert echoed(store, ANSWERED, scope) == [None] * 2


def test_what_clients_do_to_content_does_not_matter() -> None:
    store = Echo()
    store.keep(SCOPE, ASKED, "Hello\n", "I greet.")
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    for content in ("Hello", " Hello\n", parts):
        turn = {"role": "assistant", "content": content, "refusal": None}
        assert (
            echoed(store, [{"content": [{"type": "text", "text": "hi"}], "role": "user"}, turn])[1] == "I greet."
        )


@pytest.mark.parametrize("more", [{"reasoning_content": "mine"}, {"reasoning": "mine"}, {"tool_calls": [{}]}])
def test_what_a_client_says_itself_holds(more: dict[str, Any]) -> None:
    store = Echo()
    store.keep(SCOPE, ASKED, "Hello", "I greet.")
    messages = [*ASKED, ANSWERED[1] | more]
    assert store.filled(SCOPE, messages) == messages


def test_a_longer_conversation_has_all_its_reasoning_back() -> None:
    store = Echo()
    store.keep(SCOPE, ASKED, "Hello", "first")
    second = [*ANSWERED, {"role": "user", "content": "so"}]
    store.keep(SCOPE, second, "So.", "second")
    assert echoed(store, [*second, {"role": "assistant", "content": "So."}]) == [None, "first", None, "second"]


def test_bounds() -> None:
    store = Echo(max_bytes=80, max_entries=3)
    for number in range(5):
        store.keep(SCOPE, ASKED, f"{number}", "x" * 10)
    assert (len(store), store.num_bytes) == (3, 30)
    store.keep(SCOPE, ASKED, "long", "x" * 11)
    assert len(store) == 3
    assert echoed(store, [*ASKED, {"role": "assistant", "content": "2"}])[1]
    store.keep(SCOPE, ASKED, "5", "é" * 5)
    assert not echoed(store, [*ASKED, {"role": "assistant", "content": "3"}])[1]
    store.keep(SCOPE, ASKED, "5", "y")
    assert store.num_bytes == 21


@pytest.mark.anyio
async def test_a_prompt_is_as_if_the_reasoning_had_been_sent(tmp_path: Path) -> None:
    sampler = script("I plan.\n</think>\n\nHello", "I plan.\n</think>\n\nHello", "x</think>Well")
    async with served(checkpoint(tmp_path, THINKING), sampler=sampler) as service:
        answer = (await service.answer(CHAT, HI))["choices"][0]["message"]
        said = {"role": "assistant", "content": answer["content"]}
        more = [{"role": "user", "content": "and?"}]
        bodies = [
            HI | {"messages": [*HI["messages"], turn, *more], "seed": 2} | fields
            for turn, fields in (
                (said, {}), (answer, {}), (said, {"cache_salt": "x"}), (said, {"cache_prompt": False}),
            )
        ]  # fmt: skip
        wholes = [await service.answer(CHAT, body) for body in bodies]
        prompts = [service.engine.language.tokens.decode(row.request.prompt) for row in service.engine.rows[1:]]
    assert "<think>\nI plan.\n</think>\n\nHello<|im_end|>" in prompts[0]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]
    assert "I plan." not in prompts[2]
    used = wholes[0]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert used >= len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nI plan.") // 16 * 16 - 32
