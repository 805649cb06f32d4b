"""The bodies of llama-server's own dialect, to its README. As in `validate.py` a field acts or is refused by name.

What is inherited of OpenAI's fields is what llama-server takes too. NEUTRAL are its fields that do not act here,
with the values that ask for nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from engine.errors import RequestError
from engine.request import Grammar
from server.bodies import MAX_CHOICES, MAX_LOGPROBS, GenerationBody
from server.chat import ChatBody
from server.formats import schema_grammar
from server.toolchoice import ToolChoice
from server.validate import MAX_ECHOED

NO_BOUND = (1 << 31) - 1  # new tokens: more than any context holds

# The order in which stages are applied here, with and without those that llama-server leaves out of its default.
SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
DEFAULT_SAMPLERS = ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]

Bias = Annotated[float, Meta(ge=-100, le=100)]
NEVER = -100.0


class PromptObject(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as an object, which might have held media."""

    prompt_string: str


Part = str | int
Prompt = str | Sequence[Part]


class NativeCompletionBody(GenerationBody, kw_only=True):
    """`POST /completion`. A prompt is a text, or a list of ids and texts that follow each other; a list of texts
    alone, or of such lists, is several prompts.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "id_slot": (-1,),
        "post_sampling_probs": (False,),
        "timings_per_token": (False,),
        "return_progress": (False,),
        "sse_ping_interval": (),
        "n_keep": (0, -1),
        "n_discard": (0,),
        "n_indent": (0,),
        "n_cache_reuse": (0,),
        "t_max_predict_ms": (0, -1),
        "samplers": (SAMPLERS, DEFAULT_SAMPLERS),
        "lora": ([],),
        "multimodal_data": (),
    }

    prompt: str | list[str | int | list[Part] | PromptObject] | PromptObject
    n_predict: Annotated[int, Meta(ge=-1)] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    n_cmpl: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: dict[int, Bias] | list[tuple[int, Bias | bool]] = {}  # type: ignore[assignment]  # noqa: RUF012
    return_tokens: bool = False
    json_schema: dict[str, Any] | None = None
    response_fields: list[str] | None = None

    def __post_init__(self) -> None:
        """Take what has two forms by one; False is a bias that bans."""
        if isinstance(self.logit_bias, list):
            if any(bias is True for _, bias in self.logit_bias):
                raise ValueError("a bias is a number, or false to ban the token")
            self.logit_bias = {token: NEVER if bias is False else bias for token, bias in self.logit_bias}
        if self.n_cmpl is not None:
            if self.n not in (1, self.n_cmpl):
                raise ValueError("n_cmpl and n differ; send one of them")
            self.n = self.n_cmpl
        self.grammar = self.grammar or None

    def check(self) -> None:
        """Raises RequestError."""
        super().check()
        if self.n_predict == 0:
            raise RequestError(
                "n_predict: 0 is not supported here: an answer has at least one token", param="n_predict"
            )
        if self.stream_options is not None:
            raise RequestError("stream_options: the last frame has all counts anyway", param="stream_options")
        if None not in (self.n_predict, self.max_tokens) and self.n_predict != self.max_tokens:
            raise RequestError("n_predict and max_tokens differ; send one of them", param="n_predict")

    def constraint(self) -> Grammar | None:
        if self.json_schema is None:
            return super().constraint()
        if super().constraint() is not None:
            raise RequestError("json_schema: an answer is held to one grammar", param="json_schema")
        return schema_grammar(self.json_schema, param="json_schema")

    def bound(self) -> int | None:
        if self.n_predict == -1:
            return NO_BOUND
        return self.max_tokens if self.n_predict is None else self.n_predict

    def num_logprobs(self) -> int | None:
        return self.n_probs or None

    def prompts(self) -> list[Prompt]:
        """One entry for each prompt. Raises RequestError where there is none."""
        prompt = self.prompt
        if not isinstance(prompt, list):
            return [_text(prompt)]
        if not prompt:
            raise RequestError("prompt: there is nothing to continue", param="prompt")
        parts = [part for part in prompt if isinstance(part, (str, int))]
        if len(parts) == len(prompt) and any(isinstance(part, int) for part in parts):
            return [parts]
        if any(isinstance(part, int) for part in parts):
            raise RequestError("prompt: ids stand beside texts and ids, not beside prompts", param="prompt")
        return [part if isinstance(part, list) else _text(part) for part in prompt if not isinstance(part, int)]

    @property
    def is_one(self) -> bool:
        """Whether there is one answer, not a list of them."""
        return len(self.prompts()) * self.n == 1


def _text(prompt: str | PromptObject) -> str:
    return prompt.prompt_string if isinstance(prompt, PromptObject) else prompt


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`. `content` is a text, or a list of texts and ids."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"parse_special": (True,)}

    content: str | list[Part]
    model: str = ""
    add_special: bool = False
    with_pieces: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    tokens: list[int]
    model: str = ""


class TemplateBody(msgspec.Struct, kw_only=True):
    """`POST /apply-template`: what of a chat request decides its prompt."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str = ""
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    def chat(self) -> ChatBody:
        """The chat request that would have this prompt. Raises RequestError or NotSupported."""
        body = ChatBody(
            messages=self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
        )
        body.check()
        return body


def projected(body: Mapping[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """What of an answer was asked for: `a/b` is the field `b` of `a`, which moves up. What is missing is none."""
    if fields is None:
        return dict(body)
    chosen: dict[str, Any] = {}
    for path in fields:
        value: Any = body
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            chosen[path.rpartition("/")[2][:MAX_ECHOED]] = value
    return chosen
