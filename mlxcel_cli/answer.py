"""One answer on the terminal: its text on stdout as it comes, what is to be said about it on stderr."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from mlxcel_cli import config, render
from mlxcel_cli.pieces import End, Piece, Prefill, Reasoning, Text
from mlxcel_cli.view import View

SILENCE_S = 1.0
HOW_TO_SEE = "--show-reasoning, or /reasoning in a chat, shows it"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that was shown whole. `first_s` is the time to its first token as the person felt it.

    `thought` is the reasoning; `only_thought`: it was not shown, and there was nothing else.
    """

    end: End
    first_s: float
    thought: str = ""
    only_thought: bool = False


class Writer(Protocol):
    """Where an answer's text goes. `is_open`: the cursor stands behind text, where nothing else may be written."""

    @property
    def is_open(self) -> bool: ...

    def feed(self, text: str) -> None:
        """More text."""

    def end(self) -> None:
        """There is no more: end the line."""


class Plain:
    """Text as it is."""

    def __init__(self) -> None:
        self.is_open = False

    def feed(self, text: str) -> None:
        render.put(text)
        self.is_open = not text.endswith("\n")

    def end(self) -> None:
        if self.is_open:
            render.put("\n")
            self.is_open = False


class Thoughts:
    """What the model thinks before it answers: shown dimmed, folded into one line, or part of the waiting."""

    def __init__(self, wish: str, status: render.Status) -> None:
        self._wish = wish
        self._status = status
        self._is_screen = render.is_terminal(sys.stderr)
        self._since_s: float | None = None
        self._last = "\n"
        self.text = ""

    def take(self, text: str, *, on_screen: bool) -> None:
        """More of it; while `on_screen` holds other text, nothing is drawn over it."""
        self._since_s = self._since_s or time.monotonic()
        self.text += text
        if self._wish == "show":
            self._status.clear()
            render.aside(_shown(text, self._is_screen))
            self._last = text[-1]
        elif not on_screen:
            self._status.show(f"thinking ... {time.monotonic() - self._since_s:.0f} s")

    def close(self) -> None:
        """The answer begins, or nothing more comes."""
        if self._since_s is None:
            return
        if self._wish == "show":
            render.aside("\n" if self._last == "\n" else "\n\n")
        elif self._wish == "fold":
            self._status.clear()
            render.note(f"(thought for {time.monotonic() - self._since_s:.1f} s; /reasoning shows it)")
        self._since_s = None


async def show(pieces: AsyncGenerator[Piece, None], view: View = View()) -> Answer:
    """Write an answer to stdout as it comes, and a note on stderr while it keeps people waiting.

    Reasoning is talk: it goes to stderr, or nowhere.
    """
    status, started_s, first_s = render.Status(), time.monotonic(), None
    waiting = asyncio.get_running_loop().call_later(SILENCE_S, status.show, "waiting for the model ...")
    writer, thoughts = _writer(view), Thoughts(view.reasoning, status)
    end, has_text, is_screen = End(""), False, render.is_terminal(sys.stdout)
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Text | Reasoning):
                    first_s = first_s or time.monotonic() - started_s
                    waiting.cancel()
                if isinstance(piece, Text):
                    status.clear()
                    thoughts.close()
                    writer.feed(_shown(piece.text, is_screen))
                    has_text = True
                elif isinstance(piece, Reasoning):
                    if view.reasoning == "show":
                        writer.end()
                    thoughts.take(piece.text, on_screen=writer.is_open)
                elif isinstance(piece, Prefill):
                    if time.monotonic() - started_s >= SILENCE_S and not writer.is_open:
                        status.show(f"reading the prompt: {piece.done} of {piece.total} tokens")
                else:
                    end = piece
    finally:
        waiting.cancel()
        status.clear()
        writer.end()
        thoughts.close()
    only_thought = bool(thoughts.text) and not has_text and view.reasoning != "show"
    return Answer(end, first_s or time.monotonic() - started_s, thoughts.text, only_thought)


def _writer(view: View) -> Writer:
    """Markdown where it is wanted and the terminal can, else plain text."""
    if not (view.markdown and render.is_terminal(sys.stdout) and config.wants_colour()):
        return Plain()

    from mlxcel_cli.markdown import Markdown

    return Markdown(lambda text: render.put(text) if text else None, lambda: render.terminal_size(sys.stdout))


def _shown(text: str, is_screen: bool) -> str:
    return text.translate(render.SHOWN_CONTROLS) if is_screen else text


def remark(shown: Answer, max_tokens: int | None, *, by: str, with_stats: bool) -> None:
    """What there is to say once an answer is whole: that it was cut, and its numbers where they are wanted.

    `by` is what bounded it to `max_tokens`.
    """
    thought = f"(nothing but reasoning came; {HOW_TO_SEE})" if shown.only_thought else ""
    for line in (thought, cut(shown, max_tokens, by), with_stats and stats(shown)):
        if line:
            render.note(line)


def cut(shown: Answer, max_tokens: int | None, by: str) -> str:
    """Why an answer ended before its end, or nothing."""
    if shown.end.finish_reason != "length":
        return ""
    count = shown.end.usage.get("completion_tokens")
    at = "cut" if count is None else f"cut at {render.count(count, 'token')}"
    if max_tokens is not None and max_tokens == count:
        return f"({at} by {by} {max_tokens}; without it the answer runs to its end)"
    return f"({at}: the context is full, or the server allows no more)"


def stats(shown: Answer) -> str:
    """Prompt and new tokens with their rates, and the time to the first token."""
    timings = shown.end.timings
    prompt, new, num_cached = _counts(shown.end)
    parts = [
        _rate("prompt", prompt, timings.get("prompt_per_second"), num_cached=num_cached),
        _rate("new", new, timings.get("predicted_per_second")),
        f"first token after {shown.first_s:.2f} s",
        _drafted(timings),
    ]
    return " | ".join(part for part in parts if part)


def taken(shown: Answer, context_length: int | None) -> str:
    """An answer's tokens, how fast they came, and what prompt and answer take of the context."""
    _, new, num_cached = _counts(shown.end)
    both = context(shown, context_length)
    parts = [
        _rate("", new, shown.end.timings.get("predicted_per_second")),
        f"context {both}" if both else "",
        f"{num_cached} cached" if num_cached else "",
    ]
    return " | ".join(part for part in parts if part)


def context(shown: Answer, context_length: int | None) -> str:
    """What an answer and its prompt take of the context; nothing where the server does not say."""
    prompt, new, _ = _counts(shown.end)
    return "" if prompt is None or new is None else of_context(prompt + new, context_length)


def _counts(end: End) -> tuple[int | None, int | None, int]:
    """The prompt's tokens, the new ones, and how many of the prompt's were cached."""
    timings, usage = end.timings, end.usage
    num_cached = timings.get("cache_n") or usage.get("prompt_tokens_details", {}).get("cached_tokens") or 0
    prompt = usage.get("prompt_tokens", timings.get("prompt_n"))
    return prompt, usage.get("completion_tokens", timings.get("predicted_n")), num_cached


def of_context(num_tokens: int, context_length: int | None) -> str:
    """What a conversation takes of the context, whose length may not be known."""
    if not context_length:
        return render.count(num_tokens, "token")
    return f"{num_tokens} of {context_length} ({num_tokens / context_length:.0%})"


def _drafted(timings: Mapping[str, Any]) -> str:
    """What came of draft tokens, where anybody drafts."""
    kind, rounds = render.harmless(timings.get("draft_kind", "")), timings.get("draft_rounds")
    if not kind:
        return ""
    pauses = timings.get("draft_pauses", 0)
    paused = f", paused {render.count(pauses, 'time')}" if pauses else ""
    if not rounds:
        return f"{kind}: nothing drafted{paused}"
    proposed, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    each = f"{timings.get('draft_mean_accepted', 0):.1f} in each of {render.count(rounds, 'step')}"
    return f"{kind}: {accepted} of {proposed} draft tokens accepted, {each}{paused}"


def _rate(what: str, count: int | None, per_second: float | None, *, num_cached: int = 0) -> str:
    """How many tokens, and how fast those that were computed."""
    if count is None:
        return ""
    cached = f", {num_cached} of them cached" if num_cached else ""
    rate = f", {per_second:.1f} tokens/s" if per_second else ""
    named = f"{what}: " if what else ""
    return f"{named}{render.count(count, 'token')}{cached}{rate}"
