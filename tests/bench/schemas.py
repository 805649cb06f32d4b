"""Whether a real model's answers keep to random JSON schemas, on the compiled kernels and through the server.

    python -m tests.bench.schemas [MODEL] [--schemas 200] [--rows 4] [--tokens 160]

Each schema is refused, or its answer ends by itself and is valid, or by the bound on its tokens and says so. The
first that is not so ends the run, with an error that names the schema.
"""

import argparse
import asyncio
import time
from collections import Counter
from pathlib import Path

from engine.engine import Engine
from engine.model.pull import ensure
from tests.server.schemas import Outcome, outcomes
from tests.serving import CHAT, served

MESSAGES = [{"role": "user", "content": "Answer with a short JSON value of any kind."}]


async def ask(path: Path, num_schemas: int, num_rows: int, num_tokens: int) -> list[Outcome]:
    body = {"messages": MESSAGES, "temperature": 0.8, "max_tokens": num_tokens}
    async with served(path, open_engine=Engine.open, parallel=num_rows) as service:
        found = await outcomes(service, CHAT, body, range(num_schemas), num_rows)
        model = await service.app.state.service.models.default.bridge.model()
        print(path.name, *model.notes, sep="\n  ")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160)
    asked = parser.parse_args()
    path = Path(asked.model) if Path(asked.model).is_dir() else ensure(asked.model)
    started_s = time.perf_counter()
    found = asyncio.run(ask(path, asked.schemas, asked.rows, asked.tokens))
    seconds = time.perf_counter() - started_s
    for reason, count in sorted(Counter(outcome.reason for outcome in found).items()):
        print(f"{count:6} {reason}")
    print(f"{sum(outcome.num_tokens for outcome in found)} tokens in {seconds:.0f} s")


if __name__ == "__main__":
    main()
