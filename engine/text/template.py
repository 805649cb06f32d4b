"""The one chat render: messages to the text of a prompt, by the checkpoint's own template.

Templates differ in what they know. Here a dialect's liberties end: null content is empty text, parts are
joined, `developer` is `system`, a call's arguments are an object, reasoning has the name that the template reads.
Where a template has no place for tools, they are written into the system message, and calls and results into the
turns; where it has none for a system turn but at the beginning, later ones become the user's, and where it has
none at all, so does the first. The template engine is given.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from engine.errors import ConfigError, NoChatTemplate, RequestError, TemplateFailed
from engine.text.filter import Markup

Message = Mapping[str, Any]

_THINKING_FIELD = re.compile(r"""message\.thinking|message\[["']thinking|["']thinking["'] in message""")
# What a template shows that takes system turns anywhere, and one that takes the first.
_ANYWHERE = ("system", "system", "user", "assistant", "system", "user")
_FIRST = ("system", "user")
# Put behind a text that is to be gone on from, so that its end is found whatever the template makes of it.
_GOES_ON = "goes-on-here-7c41d0"
_TOOLS_PROMPT = """You can call these functions:
{tools}
To call one, answer with a JSON object between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"parameter": "value"}}}}
</tool_call>"""


class ChatTemplate:
    """A checkpoint's chat template: `apply(messages, **arguments)` renders it, `source` is its text if known.

    `apply` None means a base model, which has none.
    """

    def __init__(self, apply: Callable[..., str] | None, source: str = "") -> None:
        self._apply = apply
        self.source = source
        self._knows_tools = not source or "tools" in source

    @classmethod
    def of(cls, tokenizer: Any, given: Mapping[str, Any] = MappingProxyType({})) -> "ChatTemplate":
        """The template of an mlx-lm tokenizer wrapper, which gets what is `given` where nobody says otherwise.

        Raises ConfigError for what it does not ask for.
        """
        if not tokenizer.has_chat_template:
            _refuse(given, "the model has no chat template")
            return cls(None)
        source = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
        always = {"add_generation_prompt": True, "enable_thinking": Markup.of(tokenizer, source).reasons, **given}

        def apply(messages: list[dict[str, Any]], **arguments: Any) -> str:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **(always | arguments)))

        template = cls(apply, source)
        _refuse(
            [name for name in given if not template.takes(name)], "the model's chat template does not ask for it"
        )
        return template

    @property
    def exists(self) -> bool:
        return self._apply is not None

    def takes(self, argument: str) -> bool:
        """Whether the template asks for this argument; one whose text is not known is taken to."""
        return not self.source or argument in self.source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        ends: bool = False,
        continues: bool = False,
    ) -> str:
        """The prompt for the assistant's next turn, generation prompt included unless it `ends` with the messages,
        or `continues` the last of them: then it ends with that one's text.

        Raises NoChatTemplate for a base model, RequestError for a message no template can take or one whose text
        a prompt cannot end with, TemplateFailed when the template refuses or fails.
        """
        if self._apply is None:
            raise NoChatTemplate(
                "this model has no chat template: it is a base model",
                param="messages",
                hint="send the text to /v1/completions",
            )
        turns = [self._normalized(index, message) for index, message in enumerate(messages)]
        extra = dict(arguments or {})
        if ends or continues:
            extra["add_generation_prompt"] = False
        if continues:
            turns[-1]["content"] += _GOES_ON
        if self._knows_tools:
            extra["tools"] = [dict(tool) for tool in tools] or None
        else:
            turns = _with_tools_written_out(turns, tools)
        if any(turn["role"] == "system" for turn in turns):
            turns = self._with_systems_placed(turns)
        try:
            text = self._apply(turns, **extra)
        except Exception as fault:
            raise TemplateFailed(f"the chat template refused these messages: {fault}", param="messages") from fault
        return _cut(text, begun_by(messages[-1])) if continues else text

    def _with_systems_placed(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The turns with system turns where the template shows them."""
        is_first_alone = turns[0]["role"] == "system" and all(turn["role"] != "system" for turn in turns[1:])
        if self._takes_systems_anywhere or (is_first_alone and self._takes_system_first):
            return turns
        return _with_systems_told(turns, keep_first=self._takes_system_first)

    @functools.cached_property
    def _takes_systems_anywhere(self) -> bool:
        return self._shows(_ANYWHERE)

    @functools.cached_property
    def _takes_system_first(self) -> bool:
        return self._shows(_FIRST)

    def _shows(self, roles: Sequence[str]) -> bool:
        """Whether turns of these roles are all there in what the template makes of them."""
        assert self._apply is not None, "a base model renders nothing"
        texts = [f"the turn {number} is here" for number in range(len(roles))]
        try:
            text = self._apply([{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)])
        except Exception:  # noqa: BLE001
            # A template refuses by raising whatever it likes.
            return False
        return all(one in text for one in texts)

    def _normalized(self, index: int, message: Message) -> dict[str, Any]:
        turn = {key: value for key, value in message.items() if value is not None}
        if turn.get("role") == "developer":
            turn["role"] = "system"
        turn["content"] = text_of(turn.get("content"))
        if calls := turn.pop("tool_calls", None):
            turn["tool_calls"] = [_normalized_call(index, call) for call in calls]
        thought = turn.pop("reasoning", None) or turn.get("reasoning_content")
        if thought:
            turn["reasoning_content"] = thought
            if _THINKING_FIELD.search(self.source) and not (calls and turn["content"]):
                turn["thinking"] = thought  # Harmony's templates refuse it beside content and calls
        return turn

    def boundaries(
        self,
        messages: Sequence[Message],
        prompt: Sequence[int],
        encode: Callable[[str], Sequence[int]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The lengths at which turns begin in `prompt`, the tokens of these messages: ascending, its own the last.

        A user's turn begins where all before it ends, an assistant's behind the generation prompt. Each is a
        function of what comes before, so that longer conversations have the boundaries of shorter ones. A
        boundary that the template does not render as a beginning of the prompt is left out.
        """
        lengths = {len(prompt)}
        for number, message in enumerate(messages):
            role = message.get("role")
            if number == 0 or role not in ("user", "assistant"):
                continue
            try:
                text = self.render(messages[:number], tools=tools, arguments=arguments, ends=role == "user")
            except TemplateFailed:
                continue
            tokens = tuple(encode(text))
            if 0 < len(tokens) < len(prompt) and tokens == tuple(prompt[: len(tokens)]):
                lengths.add(len(tokens))
        return tuple(sorted(lengths))

    def message_at(
        self,
        messages: Sequence[Message],
        before: str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> int | None:
        """Index of the message whose text the prompt goes on with behind `before`, a beginning of it.

        None where that is the generation prompt, or where the renders of the first messages do not tell.
        """
        previous: str | None = ""
        for stop in range(1, len(messages) + 1):
            try:
                text = self.render(messages[:stop], tools=tools, arguments=arguments, ends=True)
            except TemplateFailed:
                previous = None
                continue
            if len(text) > len(before) and text.startswith(before):
                return stop - 1 if previous is not None and before.startswith(previous) else None
            previous = text
        return None


def _refuse(given: Iterable[str], why: str) -> None:
    for name in given:
        raise ConfigError("chat_template_args", f"chat_template_args: {name}: {why}")


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """A message's content as one text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def begun_by(message: Message) -> str:
    """What a prompt that goes on from `message` ends with: its text, but for white space before it."""
    return text_of(message.get("content")).lstrip()


def _cut(text: str, begun: str) -> str:
    """A rendered `text` up to where `begun` goes on. Raises RequestError where it does not have it as it is."""
    before, mark, _ = text.partition(_GOES_ON)
    if not mark or text.count(mark) > 1 or not before.endswith(begun):
        raise RequestError(
            "messages: the chat template does not show the text of the last message as it is, so that nothing can "
            "go on from it",
            param="messages",
        )
    return before


def _with_systems_told(turns: Sequence[dict[str, Any]], *, keep_first: bool) -> list[dict[str, Any]]:
    """System turns as one at the beginning, if that is kept, and as the user's; a user's next to one joins it."""
    placed: list[dict[str, Any]] = []
    begins = keep_first  # still among the system turns at the beginning
    was_system = False
    for turn in turns:
        is_system = turn["role"] == "system"
        begins = begins and is_system
        told = {**turn, "role": "user"} if is_system and not begins else turn
        last = placed[-1] if placed else None
        if last is not None and last["role"] == told["role"] and (is_system or was_system):
            texts = (text for text in (last["content"], told["content"]) if text)
            placed[-1] = {**last, "content": "\n\n".join(texts)}
        else:
            placed.append(told)
        was_system = is_system
    return placed


def _normalized_call(index: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function, where = dict(call["function"]), f"messages[{index}].tool_calls"
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.encode() if arguments.strip() else b"{}")
        except (ValueError, RecursionError) as fault:
            raise RequestError(f"{where}: the arguments are not JSON: {fault}", param=where) from fault
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}: the arguments must be an object", param=where)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_tools_written_out(
    turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    written = []
    for turn in turns:
        text = turn["content"]
        calls = [call["function"] for call in turn.get("tool_calls", ())]
        for call in calls:
            payload = {"name": call["name"], "arguments": call.get("arguments", {})}
            text += f"{text and chr(10)}<tool_call>\n{json.dumps(payload, ensure_ascii=False)}\n</tool_call>"
        if turn["role"] == "tool":
            written.append({"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"})
        else:
            written.append({"role": turn["role"], "content": text})
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        prompt = _TOOLS_PROMPT.format(tools=listed)
        if written and written[0]["role"] == "system":
            written[0] = {"role": "system", "content": f"{written[0]['content']}\n\n{prompt}".lstrip()}
        else:
            written.insert(0, {"role": "system", "content": prompt})
    return written
