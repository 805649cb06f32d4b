"""What it costs to hand rows over: bytes, seconds, and both against the time to the first token.

A router, a prefill and a decode node, and one process that does it all, on this machine, in turn. The hand-over is
what lies between a request's first and second token beyond a usual step. `python -m tests.bench.cluster` prints a
line of JSON for each length of prompt.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2

from engine.model.pull import ensure
from tests.cluster import Cluster, Node, cluster, until

NUM_NEW = 24
SENT = 'mlxcel_node_state_bytes_total{way="sent"}'


def times(client: httpx2.Client, prompt: list[int]) -> tuple[float, list[float]]:
    """Seconds to the first token, and between each two behind it."""
    body = {"prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True, "stream": True,
            "cache_prompt": False}  # fmt: skip
    began_s, came_s = time.perf_counter(), []
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {") and '"text"' in line:
                came_s += [time.perf_counter()]
    return came_s[0] - began_s, [later - sooner for sooner, later in pairwise(came_s)]


def measured(one: Cluster, alone: httpx2.Client, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over fresh prompts of so many tokens."""
    rows = []
    for repeat in range(repeats):
        prompt = [(repeat * 31 + 7 * i + 3) % 40000 + 100 for i in range(num_tokens)]
        before = one.metric("prefill-0", SENT)
        ttft_s, gaps_s = times(one.client, prompt)
        num_bytes = one.metric("prefill-0", SENT) - before
        alone_s, alone_gaps_s = times(alone, prompt)
        step_s = statistics.median(gaps_s[1:])
        over_s = max(gaps_s[0] - step_s, 1e-6)
        rows.append(
            {
                "ttft_s": ttft_s,
                "alone_ttft_s": alone_s,
                "step_s": step_s,
                "alone_step_s": statistics.median(alone_gaps_s),
                "hand_over_s": over_s,
                "bytes": num_bytes,
                "bytes_per_s": num_bytes / over_s,
                "share_of_ttft": over_s / ttft_s,
            }
        )
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"prompt_tokens": num_tokens, "bytes_per_token": medians["bytes"] / num_tokens, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    model = ensure(given.model)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        one = stack.enter_context(cluster(model, Path(folder), prefill=1, decode=1))
        node = Node("alone", [str(model)], Path(folder))
        node.start()
        stack.callback(node.kill)
        until(node.healthy, "the one process")
        alone = stack.enter_context(httpx2.Client(base_url=node.url, timeout=300))
        for client in (one.client, alone):  # the first steps record themselves
            times(client, [100 + i for i in range(64)])
        for num_tokens in given.prompts:
            rounded = {k: round(v, 4) for k, v in measured(one, alone, num_tokens, given.repeats).items()}
            print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
