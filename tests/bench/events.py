"""What it costs the engine to be watched: tokens a second with so many who read `/events`.

    python -m tests.bench.events [MODEL] [--watchers 0 1 8] [--streams 4] [--new 200] [--repeats 5]

A live server on a socket; so many greedy answers at once, over HTTP and not streamed; the arms in turn. A watcher
is a connection whose frames are read and dropped, in a thread of this same process, so that its own work is in the
figures. Medians and range of new tokens a second of all answers together; how many frames a watcher got.
"""

import argparse
import contextlib
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2

from engine.engine import Engine
from engine.model.pull import ensure
from tests.serving import COMPLETIONS, Live, live


def drop(client: httpx2.Client, begun: threading.Event, counts: list[int]) -> None:
    """Read frames until the server ends or the connection does."""
    with contextlib.suppress(httpx2.TransportError), client.stream("GET", "/events") as response:
        for line in response.iter_lines():
            counts[0] += line.startswith("data: ")
            begun.set()


def rate(server: Live, num_watchers: int, num_streams: int, num_new: int) -> tuple[float, float]:
    """New tokens a second, and frames of a watcher."""
    counts, clients = [0], [server.client() for _ in range(num_watchers)]
    begun = [threading.Event() for _ in clients]
    for client, event in zip(clients, begun, strict=True):
        threading.Thread(target=drop, args=(client, event, counts), daemon=True).start()
        assert event.wait(60), "a watcher hears nothing"
    body = {"max_tokens": num_new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    with server.client() as client, ThreadPoolExecutor(num_streams) as pool:
        client.timeout = 600
        asked_s = time.perf_counter()
        asked = [
            pool.submit(client.post, COMPLETIONS, json=body | {"prompt": f"{i}. Once upon a time"})
            for i in range(num_streams)
        ]
        num_tokens = sum(one.result().json()["usage"]["completion_tokens"] for one in asked)
        took_s = time.perf_counter() - asked_s
    for client in clients:
        client.close()
    return num_tokens / took_s, counts[0] / max(num_watchers, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--watchers", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    folder = Path(given.model) if Path(given.model).exists() else ensure(given.model)
    rates: dict[int, list[float]] = {arm: [] for arm in given.watchers}
    frames: dict[int, float] = {}
    with live(folder, open_engine=Engine.open, parallel=given.streams) as server:
        rate(server, 0, given.streams, given.new)
        for _ in range(given.repeats):
            for arm in given.watchers:
                found, frames[arm] = rate(server, arm, given.streams, given.new)
                rates[arm].append(found)
    for arm, found in rates.items():
        low, high = min(found), max(found)
        middle = statistics.median(found)
        sys.stdout.write(
            f"{arm} watchers: {middle:.1f} tokens/s ({low:.1f} to {high:.1f}), {frames[arm]:.0f} frames\n"
        )


if __name__ == "__main__":
    main()
