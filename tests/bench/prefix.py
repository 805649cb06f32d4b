"""Clients behind one whose long system text is committed: time to first token, beside a cold server and a rival.

    python -m tests.bench.prefix [MODEL] [--clients 7] [--system 1024] [--repeats 3] [--timeout 600] [--no-rival]

One client sends a system text of about so many tokens and has its answer; then the others, all at once, send the
same text with a question each. Their mean time to first token on `mlxcel serve`, on the same with
`--no-prompt-cache`, and on `mlx_lm.server` on the same checkpoint, in turn, in one run; medians of the repeats, of
which the rival has one. A request without a first token after `--timeout` seconds counts as that long, and its
figure as a lower bound.
"""

import argparse
import asyncio
import statistics
from dataclasses import dataclass
from pathlib import Path

import httpx2

from engine.model.pull import ensure
from tests.bench.serve import WORDS, ask, body, running

NUM_NEW = 4
QUESTIONS = ("the fox", "the crow", "the hill", "the cheese", "the tree", "the beginning", "the end")


@dataclass(frozen=True)
class Round:
    """Seconds to the first token: of the client that came first, and of those after it, on average."""

    first_s: float
    others_s: float
    is_bound: bool


def system_text(num_words: int, salt: str) -> str:
    words = (WORDS[(7 * i + i // 5) % len(WORDS)] for i in range(num_words))
    return f"Tale {salt}: {' '.join(words)}."


async def first_token_s(client: httpx2.AsyncClient, system: str, question: str, timeout_s: float) -> float:
    """Seconds to the first token, or `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return (await ask(client, body(system, NUM_NEW, question))).first_s
    except TimeoutError:
        return timeout_s


def run(address: str, system: str, num_clients: int, timeout_s: float) -> Round:
    async def ask_all() -> Round:
        async with httpx2.AsyncClient(base_url=address, timeout=None) as client:
            first_s = await first_token_s(client, system, "Who is in it?", timeout_s)
            questions = [f"{i}: tell me of {QUESTIONS[i % len(QUESTIONS)]}." for i in range(num_clients)]
            others = await asyncio.gather(
                *(first_token_s(client, system, question, timeout_s) for question in questions)
            )
        return Round(first_s, statistics.mean(others), timeout_s in others)

    return asyncio.run(ask_all())


def measured(
    model: Path, server: str, flags: tuple[str, ...], asked: argparse.Namespace, repeats: int
) -> list[Round]:
    with running(server, model, asked.clients + 1, *flags) as address:
        return [
            run(address, system_text(asked.system, f"{repeat}"), asked.clients, asked.timeout)
            for repeat in range(repeats)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=7)
    parser.add_argument("--system", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--no-rival", action="store_true")
    asked = parser.parse_args()
    model = ensure(asked.model)
    arms = {
        "mlxcel": measured(model, "mlxcel", (), asked, asked.repeats),
        "mlxcel, cold": measured(model, "mlxcel", ("--no-prompt-cache",), asked, asked.repeats),
    }
    if not asked.no_rival:
        arms["mlx_lm.server"] = measured(model, "mlx_lm", (), asked, 1)
    print(
        f"{asked.clients} clients behind one, system text of about {asked.system} tokens: seconds to first token"
    )
    print(f"{'':16}{'first':>10}{'others':>10}{'ratio':>8}")
    ours_s = statistics.median(one.others_s for one in arms["mlxcel"])
    for name, rounds in arms.items():
        first_s, others_s = (statistics.median(getattr(one, n) for one in rounds) for n in ("first_s", "others_s"))
        bound = ">" if any(one.is_bound for one in rounds) else ""
        print(f"{name:16}{first_s:10.3f}{bound + format(others_s, '.3f'):>10}{others_s / ours_s:8.1f}")


if __name__ == "__main__":
    main()
