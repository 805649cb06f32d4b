"""Messages come through as they were, and whatever else comes is refused in words."""

import contextlib
import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ContextLengthExceeded, EngineStopped, NeverFits, QueueFull, RequestError, StepFailed
from engine.handover import Identity, RowState, StoredArray
from engine.request import (
    Grammar,
    Loops,
    Output,
    Request,
    Resumed,
    Row,
    Sampling,
    ThinkingBudget,
    Timings,
    TokenLogprob,
)
from engine.text.continued import Continued
from engine.text.filter import Markup
from engine.text.parts import Part
from server.roles import wire

VOCAB = 300
LOGPROB = TokenLogprob(5, -0.5, ((5, -0.5), (6, -2.0)), 7)
REQUEST = Request(
    "r", (1, 2, 3), Sampling(temperature=0.7, seed=(1 << 64) - 1, logit_bias=((4, -2.0),)), 9, ("stop",), True, 2,
    "high", False, "salt", "key", (2, 3), 4, Loops(1, 20, 12), Grammar("regex", "a+", "</t>", "<t>", "grammar"),
    Markup(("<t>", "</t>"), (("<c>", "</c>"), ("<d>", ""))), ThinkingBudget(5, (7, 8)),
    Resumed((1, 2), (LOGPROB,), 3.5, 2, 1, 4.0, 5.0), True,
)  # fmt: skip
STATE = RowState(
    Identity("digest", ("full",), "float16"), 3, (StoredArray(0, 0, (1, 2, 3, 4), "float16", 0),), ([None, 3],)
)
TO_NODE = [
    wire.Hello(), wire.Ping(), wire.Start(1, REQUEST, "", wire.Fetch("127.0.0.1:1", "handle", STATE)),
    wire.Expect(REQUEST), wire.Cancel(3), wire.Pull("handle", 0, 5), wire.Fetched("handle"),
]  # fmt: skip
OUTPUT = Output(
    Row(REQUEST, 9, 1, None), 5, "text", "stop", Timings(1, 2.0, 3, 4.0), (LOGPROB,), (Part("call", "x", False),),
    LOGPROB, 1.5,
)  # fmt: skip


@pytest.mark.parametrize("message", TO_NODE, ids=lambda message: type(message).__name__)
def test_messages_come_through(message: wire.Message) -> None:
    assert wire.for_node(wire.encoded(message)) == message


def test_an_output_comes_through_and_stands_for_the_row_here() -> None:
    said = wire.for_router(wire.encoded(wire.Said.of(4, OUTPUT)))
    assert isinstance(said, wire.Said)
    row = Row(REQUEST, 9, 1, None)
    assert dataclasses.replace(said.output(row), row=OUTPUT.row) == OUTPUT


def test_a_request_comes_through_with_the_answer_that_is_begun() -> None:
    assert REQUEST.markup is not None
    begun = dataclasses.replace(REQUEST, markup=Continued.of(REQUEST.markup, "<t>well"))
    start = wire.for_node(wire.encoded(wire.Start(1, begun, wire.begun_of(begun))))
    assert isinstance(start, wire.Start)
    assert wire.request_of(start.request, start.begun, vocab_size=VOCAB) == begun
    assert wire.request_of(REQUEST, wire.begun_of(REQUEST), vocab_size=VOCAB) == REQUEST


@pytest.mark.parametrize(
    "error",
    [
        ContextLengthExceeded(5, 4, param="prompt"),
        NeverFits("too large", param="prompt"),
        RequestError("no", param="grammar"),
        QueueFull("full"),
        EngineStopped("over"),
        StepFailed("broke"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_come_through(error: Exception) -> None:
    ended = wire.for_router(wire.encoded(wire.Ended.of(1, error)))  # type: ignore[arg-type]
    assert isinstance(ended, wire.Ended)
    assert (type(ended.error), str(ended.error)) == (type(error), str(error))
    assert getattr(ended.error, "param", "") == getattr(error, "param", "")


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": ()},
        {"prompt": (VOCAB,)},
        {"prompt": (-1,)},
        {"resumed": Resumed((VOCAB,))},
        {"thinking": ThinkingBudget(1, (VOCAB,))},
        {"sampling": Sampling(logit_bias=((VOCAB, 1.0),))},
        {"sampling": Sampling(temperature=float("nan"))},
        {"sampling": Sampling(temperature=-1.0)},
        {"sampling": Sampling(repetition_penalty=0.0)},
        {"sampling": Sampling(repeat_last_n=-2)},
        {"sampling": Sampling(mirostat=3)},
        {"sampling": Sampling(top_k=-1)},
        {"max_tokens": 0},
        {"top_logprobs": 1000},
        {"choice": -1},
        {"loops": Loops(0, 20, 12)},
        {"boundaries": (3, 2)},
        {"boundaries": (4,)},
        {"markup": Markup(("", "x"))},
        {"markup": Markup(None, (("", ""),))},
        {"markup": Markup(None, (("<a>", ""),) * 100)},
    ],
    ids=str,
)
def test_requests_that_no_router_sends_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(wire.Refused):
        wire.request_of(dataclasses.replace(REQUEST, **changed), "", vocab_size=VOCAB)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(noise: bytes, with_version: bool) -> None:
    frame = bytes((wire.VERSION,)) + noise if with_version else noise
    for read in (wire.for_node, wire.for_router, wire.for_fetcher):
        with contextlib.suppress(wire.Refused):
            read(frame)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(TO_NODE) - 1), st.randoms(use_true_random=False))
def test_messages_with_wrong_bytes_are_refused_or_sound(which: int, chance: random.Random) -> None:
    frame = bytearray(wire.encoded(TO_NODE[which]))
    for _ in range(chance.randint(1, 4)):
        frame[chance.randrange(len(frame))] = chance.randrange(256)
    with contextlib.suppress(wire.Refused):
        message = wire.for_node(frame)
        if isinstance(message, wire.Start):
            wire.request_of(message.request, message.begun, vocab_size=VOCAB)
            if message.fetch:
                message.fetch.state.unfit(STATE.identity, num_tokens=3, most_bytes=1000)


def test_another_version_is_named() -> None:
    with pytest.raises(wire.Refused, match="version 9"):
        wire.for_node(b"\x09" + wire.encoded(wire.Hello())[1:])


@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_bytes_are_cut_out_of_buffers(buffers: list[bytes], start: int, stop: int) -> None:
    parts = wire.cut([memoryview(buffer) for buffer in buffers], start, stop)
    assert b"".join(parts) == b"".join(buffers)[start:stop]
