"""One answer on the terminal: its text on stdout as it comes, what is to be said about it on stderr."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from mlxcel_cli import render
from mlxcel_cli.pieces import End, Piece, Prefill, Reasoning, Text

SILENCE_S = 1.0
# What a terminal would act on, shown instead: an answer must not move the cursor or set the window's title.
SHOWN_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
SHOWN_CONTROLS[ord("\r")] = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that was shown whole. `first_s` is the time to its first token as the person felt it.

    `only_thought`: there was reasoning that was not shown, and nothing else.
    """

    end: End
    first_s: float
    only_thought: bool = False


async def show(pieces: AsyncGenerator[Piece, None], *, show_reasoning: bool = False) -> Answer:
    """Write an answer to stdout as it comes, and a note on stderr while it keeps people waiting.

    Reasoning is talk: with `show_reasoning` it goes to stderr, else it is part of the waiting.
    """
    status, started_s, first_s, last = render.Status(), time.monotonic(), None, "\n"
    waiting = asyncio.get_running_loop().call_later(SILENCE_S, status.show, "waiting for the model ...")
    is_screen, thought = render.is_terminal(sys.stdout), ""
    end = End("")
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Text | Reasoning):
                    first_s = first_s or time.monotonic() - started_s
                    waiting.cancel()
                if isinstance(piece, Text):
                    status.clear()
                    thought = _closed(thought, show_reasoning)
                    render.put(_shown(piece.text, is_screen))
                    last = piece.text[-1]
                elif isinstance(piece, Reasoning):
                    thought = piece.text
                    if show_reasoning:
                        render.aside(_shown(piece.text, render.is_terminal(sys.stderr)))
                    else:
                        status.show("thinking ...")
                elif isinstance(piece, Prefill):
                    if time.monotonic() - started_s >= SILENCE_S:
                        status.show(f"reading the prompt: {piece.done} of {piece.total} tokens")
                else:
                    end = piece
    finally:
        waiting.cancel()
        status.clear()
        only_thought = bool(thought) and not show_reasoning
        _closed(thought, show_reasoning)
        if last != "\n":
            render.put("\n")
    return Answer(end, first_s or time.monotonic() - started_s, only_thought)


def _shown(text: str, is_screen: bool) -> str:
    return text.translate(SHOWN_CONTROLS) if is_screen else text


def _closed(thought: str, show_reasoning: bool) -> str:
    """End the reasoning that came last, if any, with a blank line where it is shown."""
    if thought and show_reasoning:
        render.aside("\n\n" if not thought.endswith("\n") else "\n")
    return ""


def remark(shown: Answer, max_tokens: int | None, *, with_stats: bool) -> None:
    """What there is to say once an answer is whole: that it was cut, and its numbers where they are wanted."""
    thought = "(nothing but reasoning came; --show-reasoning shows it)" if shown.only_thought else ""
    for line in (thought, cut(shown, max_tokens), with_stats and stats(shown)):
        if line:
            render.note(line)


def cut(shown: Answer, max_tokens: int | None) -> str:
    """Why an answer ended before its end, or nothing."""
    if shown.end.finish_reason != "length":
        return ""
    count = shown.end.usage.get("completion_tokens")
    at = "cut" if count is None else f"cut at {count} token{'' if count == 1 else 's'}"
    if max_tokens is not None and max_tokens == count:
        return f"({at} by --max-tokens {max_tokens}; without it the answer runs to its end)"
    return f"({at}: the context is full, or the server allows no more)"


def stats(shown: Answer) -> str:
    """Prompt and new tokens with their rates, and the time to the first token."""
    timings, usage = shown.end.timings, shown.end.usage
    parts = [
        _rate(
            "prompt",
            usage.get("prompt_tokens", timings.get("prompt_n")),
            timings.get("prompt_per_second"),
            num_cached=timings.get("cache_n") or 0,
        ),
        _rate(
            "new", timings.get("predicted_n", usage.get("completion_tokens")), timings.get("predicted_per_second")
        ),
        f"first token after {shown.first_s:.2f} s",
        _drafted(timings),
    ]
    return " | ".join(part for part in parts if part)


def _drafted(timings: Mapping[str, Any]) -> str:
    """What came of draft tokens, where anybody drafts."""
    kind, rounds = timings.get("draft_kind"), timings.get("draft_rounds")
    if not kind:
        return ""
    pauses = timings.get("draft_pauses", 0)
    paused = f", paused {pauses} time{'' if pauses == 1 else 's'}" if pauses else ""
    if not rounds:
        return f"{kind}: nothing drafted{paused}"
    proposed, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    each = f"{timings.get('draft_mean_accepted', 0):.1f} in each of {rounds} step{'' if rounds == 1 else 's'}"
    return f"{kind}: {accepted} of {proposed} draft tokens accepted, {each}{paused}"


def _rate(what: str, count: int | None, per_second: float | None, *, num_cached: int = 0) -> str:
    """How many tokens, and how fast those that were computed."""
    if count is None:
        return ""
    cached = f", {num_cached} of them cached" if num_cached else ""
    rate = f", {per_second:.1f} tokens/s" if per_second else ""
    return f"{what}: {count} token{'' if count == 1 else 's'}{cached}{rate}"
