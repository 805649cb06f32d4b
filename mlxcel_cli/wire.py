"""What a server sends, decoded and judged: bodies, frames of a stream, refusals and numbers.

A server may send anything. What is no answer of this API is a NoAnswer here, or is left out, so that nobody behind
this module meets a value of another type than was promised.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import MlxcelError
from mlxcel_cli.errors import EngineGone, NoAnswer, NoTemplate, Refused, ServerBusy, ServerFault
from mlxcel_cli.pieces import Prefill, Reasoning, Text

ENGINE_GONE = ("model_not_loaded", "engine_stopped")
MOST = 1 << 40  # beyond it a number is an error of the server's, and sums would overflow
MOST_DIGITS = 12
TEXTS = ("draft_kind",)  # what is said in words among numbers
NO_STREAMS = ("application/json", "text/html")


def object_of(content: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises NoAnswer."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise NoAnswer("JSON that is nested too deep") from None
    except ValueError:
        what = "HTML" if content.lstrip()[:1] == b"<" else "no JSON" if content.strip() else "nothing"
        raise NoAnswer(what) from None
    if not isinstance(value, dict):
        raise NoAnswer("JSON that is no object")
    return value


def message_of(answer: Mapping[str, Any]) -> str:
    """The words of an error, or nothing."""
    error = answer.get("error")
    words = error.get("message") if isinstance(error, dict) else error
    return words if isinstance(words, str) else ""


def refusal(status: int, content: bytes, location: str = "") -> MlxcelError:
    """The exception that a status other than 2xx stands for, in the server's words where it has any."""
    try:
        answer = object_of(content)
    except NoAnswer:
        answer = {}
    error = answer.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    code = code if isinstance(code, str) else ""
    message = message_of(answer) or f"the server answered with status {status}"
    if location:
        return Refused(f"{message}: it sends requests on to {location}", status=status, hint="ask there")
    if code == "no_chat_template":
        return NoTemplate(message, status=status, code=code)
    if code in ENGINE_GONE:
        return EngineGone(message)
    if status == 503:
        return ServerBusy(message, hint="ask again in a moment")
    if status < 500 or status == 501:
        return Refused(message, status=status, code=code)
    return ServerFault(message)


def no_stream(content: bytes) -> MlxcelError:
    """What a body is where a stream was asked for: the server's error, or no answer."""
    answer = object_of(content)
    if words := message_of(answer):
        return ServerFault(words)
    return NoAnswer("a whole answer, where a stream was asked for")


def frame_of(data: str) -> dict[str, Any]:
    """One frame of a stream. Raises ServerFault for an error, NoAnswer for what is no frame."""
    frame = object_of(data.encode())
    if frame.get("error"):
        raise ServerFault(message_of(frame) or "the server failed in mid-answer")
    return frame


def choices_of(frame: Mapping[str, Any]) -> Iterator[tuple[list[Text | Reasoning], str]]:
    """What each choice of a frame brings: pieces of text, and why the answer ended or nothing. Raises NoAnswer."""
    choices = frame.get("choices")
    if not isinstance(choices, list | None):
        raise NoAnswer("choices that are no list")
    for choice in choices or ():
        delta = _part(choice, "a choice").get("delta")
        delta = _part({} if delta is None else delta, "a delta")
        pieces: list[Text | Reasoning] = []
        if thought := _text(delta.get("reasoning_content")) or _text(delta.get("reasoning")):
            pieces.append(Reasoning(thought))
        if text := _text(delta.get("content")) or _text(choice.get("text")):
            pieces.append(Text(text))
        reason = choice.get("finish_reason")
        yield pieces, reason if isinstance(reason, str) else ""


def numbers_of(frame: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The usage and the timings of a frame that has them; what is no number in them is as if not said."""
    return {name: _numbers(frame[name]) for name in ("usage", "timings") if isinstance(frame.get(name), dict)}


def progress_of(comment: str) -> Prefill | None:
    """The progress of the prefill that a comment tells, if it does."""
    words = comment.split()
    if len(words) == 2 and words[0] == "prefill":
        done, _, total = words[1].partition("/")
        if all(number.isdecimal() and len(number) <= MOST_DIGITS for number in (done, total)):
            return Prefill(int(done), int(total))
    return None


def count_of(value: object) -> int | None:
    """The number that is a count of something, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST else None


def _numbers(said: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in said.items():
        if name.endswith("_details"):
            if isinstance(value, dict):
                kept[name] = {key: count for key, count in value.items() if count_of(count) is not None}
        elif name in TEXTS:
            if isinstance(value, str):
                kept[name] = value
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST:
            kept[name] = value
    return kept


def _part(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NoAnswer(f"{what} that is no object")
    return value


def _text(value: object) -> str:
    """A text, whole or in the parts of a list; null is none. Raises NoAnswer."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "".join(_text(part.get("text")) if isinstance(part, dict) else _text(part) for part in value)
    if not isinstance(value, str):
        raise NoAnswer("a text that is none")
    return value
