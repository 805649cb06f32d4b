"""Kill a node or the router of a running cluster with SIGKILL, at random times under load, round after round.

Every request has to end with its whole right answer, or, where the router itself was killed, with a broken
connection; whoever survives has to end without a row and without a block. `python -m tests.bench.killing
--rounds 50` prints what happened.
"""

import argparse
import json
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from tests.cluster import Cluster, cluster, streamed, until
from tests.tiny import write_checkpoint

CLIENTS = 8
LONGEST_DELAY_S = 1.5


def bodies() -> list[dict[str, Any]]:
    """Requests that take a while: greedy and seeded, short prompts and long."""
    return [
        {
            "messages": [{"role": "user", "content": f"question {number} " * (1, 40, 280)[number % 3]}],
            "max_tokens": 150 + 50 * (number % 4),
            "temperature": 0 if number % 2 else 1.1,
            "seed": number,
            "ignore_eos": True,
            **({"logprobs": True, "top_logprobs": 2} if number % 4 == 0 else {}),
        }
        for number in range(CLIENTS)
    ]


def difference(number: int, answer: dict[str, Any], expected: dict[str, Any]) -> str:
    """Where an answer leaves what it was to be."""
    ours, theirs = answer.get("text", ""), expected["text"]
    at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    wrong = [name for name in expected if answer.get(name) != expected[name]]
    said = f"{answer.get('errors')}, {answer['status']}"
    return f"request {number} differs in {wrong}, at {at} of {len(theirs)}: {said}"


def strike(
    one: Cluster,
    expected: list[dict[str, Any]],
    name: str,
    delay_s: float,
    number: signal.Signals = signal.SIGKILL,
) -> Counter[str]:
    """One round: load, a signal, and what came of every request. Raises AssertionError for anything wrong."""
    asked, struck, outcomes = bodies(), threading.Event(), Counter[str]()

    def ask(client: int) -> None:
        while True:
            after = struck.is_set()
            try:
                answer = streamed(one.client, "/v1/chat/completions", asked[client])
            except httpx2.TransportError:
                assert name == "router", "a connection to the router broke"
                outcomes["broken"] += 1
                return
            assert answer == expected[client], difference(client, answer, expected[client])
            outcomes["right"] += 1
            if after:
                return

    node = one.router if name == "router" else one.nodes[name]
    with ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(ask, client) for client in range(CLIENTS)]
        time.sleep(delay_s)
        node.kill(number)
        struck.set()
        for future in running:
            future.result()
    for survivor in one.nodes:
        if survivor != name:
            until(lambda survivor=survivor: one.idle(survivor), f"{survivor} idle")
    node.start()
    one.up()
    return outcomes


def answers(one: Cluster) -> list[dict[str, Any]]:
    """What each request is to be answered, asked one by one."""
    expected = [streamed(one.client, "/v1/chat/completions", body) for body in bodies()]
    assert all(answer["done"] and not answer["errors"] for answer in expected)
    return expected


def rounds(
    one: Cluster, num_rounds: int, seed: int, roles: Sequence[str] = ("prefill", "decode", "router")
) -> Counter[str]:
    """So many rounds, each role in turn; what came of all requests."""
    chance = random.Random(seed)
    expected = answers(one)
    total: Counter[str] = Counter()
    for number in range(num_rounds):
        role = roles[number % len(roles)]
        name = role if role == "router" else f"{role}-{chance.randrange(2)}"
        outcomes = strike(one, expected, name, chance.uniform(0, LONGEST_DELAY_S))
        total += outcomes + Counter({f"killed {role}": 1})
        print(json.dumps({"round": number, "killed": name, **outcomes, **one.stats()["metrics"]}), flush=True)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--roles", nargs="+", default=["prefill", "decode", "router"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "tiny")
        with cluster(model, Path(folder) / "logs") as one:
            print(json.dumps(rounds(one, given.rounds, given.seed, given.roles)))


if __name__ == "__main__":
    main()
