"""One raw completion at a time over the Engine, without scheduler, loop and server.

The reference arm of parity checks and benchmarks: same plan, same forward, same sampler and finish step.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import MlxcelError
from engine.request import Event, Failed, Output, Request, Sampling
from engine.text.filter import Markup


class DirectEngine:
    """Runs requests to their end on the calling thread, which must be the one that opened `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plan = engine.plan()

    def events(self, request: Request) -> Iterator[Event]:
        """Everything that happens to `request`, as it happens."""
        row = self._engine.submit(request)
        try:
            while not row.prefilled:
                yield from self._engine.prefill(self._plan.pieces([row], decoding=False))
            while row.finish_reason is None:
                yield from self._engine.step([row])
        finally:
            self._engine.release(row)

    def complete(self, request: Request) -> list[Output]:
        """The outputs of `request`. Raises what made it fail."""
        outputs = []
        for event in self.events(request):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Output):
                outputs.append(event)
        return outputs


def main() -> None:
    """Answer the JSON job on stdin with JSON on stdout: the reference arm of `mlxcel parity`, as a program.

    A job is {"model": PATH, "cases": [{"prompt": TEXT or "messages": [...], "max_tokens": N, "sampling": {...}}]};
    the answer is a list of {"text", "finish_reason", "completion_tokens"}, or of {"error"} where a case failed.
    """
    job = json.load(sys.stdin)
    engine = Engine.open(EngineConfig(model=Path(job["model"]), no_prompt_cache=True))
    direct = DirectEngine(engine)
    json.dump([_answer(engine, direct, case) for case in job["cases"]], sys.stdout)


def _answer(engine: Engine, direct: DirectEngine, case: dict[str, Any]) -> dict[str, Any]:
    try:
        boundaries: tuple[int, ...] = ()
        markup: Markup | None = None
        if "messages" in case:
            text = engine.language.template.render(case["messages"])
            prompt = engine.language.tokens.encode(text, False)
            markup = engine.language.markup.behind(text, calls=False)
            if engine.cuts_at_turns:
                boundaries = engine.language.template.boundaries(
                    case["messages"], prompt, lambda text: engine.language.tokens.encode(text, False)
                )
        else:
            prompt = engine.language.tokens.encode(case["prompt"], True)
        sampling = Sampling(**case["sampling"])
        request = Request(
            "parity", tuple(prompt), sampling, case["max_tokens"], boundaries=boundaries, markup=markup
        )
        outputs = direct.complete(request)
    except MlxcelError as error:
        return {"error": str(error)}
    return {
        "text": "".join(map(_shown, outputs)),
        "finish_reason": outputs[-1].finish_reason,
        "completion_tokens": len(outputs),
    }


def _shown(output: Output) -> str:
    """What a client is shown of an output: reasoning and answer, without markup."""
    if not output.parts:
        return output.text
    return "".join(part.text for part in output.parts if part.kind != "markup")


if __name__ == "__main__":
    main()
