"""`POST /completion`, in llama-server's shapes: raw continuation, with the tokens and settings behind it.

A stream has a frame for each piece of text and one for the end of each answer, which has all but the text; nothing
follows the last.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.request import TokenLogprob
from engine.served import ServedModel
from server.generate import Answer, Prompted, text_prompts
from server.llama import NativeCompletionBody, projected
from server.logprobs import Logprobs, Spell, listed
from server.reply import Finish, Prefilled, Reason, Text
from server.routes.common import (
    FramedDialect,
    begun,
    priority_of,
    read_body,
    request_id_of,
    respond_framed,
    served_of,
)
from server.routes.native import settings_body
from server.sse import Comment

ANY_SLOT = -1  # rows have no slot of their own that a client could ask for


class NativeDialect(FramedDialect):
    """Writes one answer down; knows the model and the prompts once it has begun."""

    def __init__(self, request_id: str, served_name: str, body: NativeCompletionBody) -> None:
        super().__init__(request_id, served_name)
        self._served_name = served_name
        self._body = body
        self.model: ServedModel | None = None
        self.prompted = Prompted((), "prompt")

    async def frames(self, answer: Answer) -> AsyncIterator[Any]:
        told: dict[int, int] = {}  # tokens of each choice that frames had
        texts: dict[int, str] = {}
        likely: dict[int, list[TokenLogprob]] = {}  # those for the next frame of each choice
        async for piece in answer.pieces():
            match piece:
                case Text(choice=choice, text=text):
                    texts[choice] = texts.get(choice, "") + text
                    tokens = answer.usage.tokens[choice]
                    said = self._said(choice, text, tokens[told.get(choice, 0) :], len(tokens))
                    yield said | self._probabilities(likely.pop(choice, ()), answer.spell)
                    told[choice] = len(tokens)
                case Logprobs(choice=choice, tokens=logprobs):
                    likely.setdefault(choice, []).extend(logprobs)
                case Finish(choice=choice, reason=reason):
                    rest = answer.usage.tokens[choice][told.get(choice, 0) :]
                    ended = self._ended(answer, choice, texts.get(choice, ""), reason)
                    ended |= {"content": "", "tokens": rest}
                    ended |= self._probabilities(likely.pop(choice, ()), answer.spell)
                    yield projected(ended, self._body.response_fields)
                case Prefilled(done=done, total=total):
                    yield Comment(f"prefill {done}/{total}")

    async def folded(self, answer: Answer) -> Any:
        ended = []
        for number, choice in enumerate(await answer.fold()):
            told = self._ended(answer, number, choice.text, choice.reason)
            if answer.logprobs is not None:
                told |= self._probabilities(answer.logprobs[number], answer.spell)
            ended.append(projected(told, self._body.response_fields))
        return ended[0] if self._body.is_one else ended

    def _probabilities(self, tokens: Sequence[TokenLogprob], spell: Spell) -> dict[str, Any]:
        """Those of the tokens of a text, where they are asked for and there are any."""
        return {"completion_probabilities": listed(tokens, spell, with_ids=True)} if tokens else {}

    def _said(self, choice: int, text: str, tokens: list[int], num_tokens: int) -> dict[str, Any]:
        return {
            "index": choice,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": ANY_SLOT,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": len(self._prompt(choice)),
        }

    def _ended(self, answer: Answer, choice: int, text: str, reason: Reason) -> dict[str, Any]:
        assert self.model is not None, "an answer that has ended has begun"
        usage, prompt, body = answer.usage, self._prompt(choice), self._body
        tokens = usage.tokens[choice]
        word = usage.stop_strings[choice]
        is_full = len(prompt) + len(tokens) >= self.model.context_length
        timings = usage.timings_body(choice)
        return {
            **self._said(choice, text, tokens if body.return_tokens else [], len(tokens)),
            "stop": True,
            "model": self._served_name,
            "generation_settings": {
                **settings_body(body.sampling(self.model.default_sampling), body.n_predict or body.max_tokens),
                "n_ctx": self.model.context_length,
                "model": self._served_name,
                "n_probs": body.n_probs,
                "stop": list(body.stops()),
                "stream": body.stream,
                "ignore_eos": body.ignore_eos,
            },
            "prompt": self.model.tokens.decode(prompt),
            "has_new_line": "\n" in text,
            "truncated": reason == "length" and is_full,
            "stop_type": "limit" if reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": timings["cache_n"],
            "timings": {
                **timings,
                "prompt_per_token_ms": _each(timings["prompt_ms"], timings["prompt_n"]),
                "predicted_per_token_ms": _each(timings["predicted_ms"], timings["predicted_n"] - 1),
            },
        }

    def _prompt(self, choice: int) -> list[int]:
        return list(self.prompted.ids[choice // self._body.n])


def _each(ms: float, count: int) -> float:
    return round(ms / count, 3) if count > 0 else 0.0


async def completion(request: Request) -> Response | ASGIApp:
    body = await read_body(request, NativeCompletionBody)
    body.check()
    served = served_of(request, body.model)
    priority = priority_of(request)
    prompts = body.prompts()
    dialect = NativeDialect(request_id_of(request, "cmpl"), served.name, body)

    async def begin() -> Answer:
        dialect.model = model = await served.bridge.model()
        dialect.prompted = prompted = await text_prompts(served.bridge, model, prompts, num_choices=body.n)
        return await begun(served, model, dialect, body, prompted, priority)

    return await respond_framed(request, served, dialect, begin, stream=body.stream, user=body.user)
