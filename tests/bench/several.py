"""One server, more models than may be loaded: `python -m tests.bench.several`.

Three tiny models and SmolLM2 with `--models-max 2` and a bound of bytes, in a process of their own; requests of
random models from 8 clients at once. Every answer is held against what its model gives when it is asked alone.
Told: how often models were loaded, how long requests took, and what was resident at most.
"""

import argparse
import asyncio
import random
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import httpx2

from engine.model.pull import ensure
from engine.size import Size
from tests.cluster import Node, resident_bytes, until
from tests.several import BODY, write_several

NUM_CLIENTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--models-max", type=int, default=2)
    parser.add_argument("--models-memory", type=Size, default=Size("600MB"))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [*map(str, write_several(folder).values()), str(ensure("smollm2-135m"))]
        arguments = [models[0], "--models", ",".join(models[1:])]
        arguments += ["--models-max", str(asked.models_max), "--models-memory", str(int(asked.models_memory))]
        server = Node("several", arguments, folder)
        server.start()
        try:
            until(server.healthy, "a server")
            asyncio.run(measure(server, models, asked.requests, asked.seed))
        finally:
            server.kill()


async def measure(server: Node, models: Sequence[str], num_requests: int, seed: int) -> None:
    before_bytes = resident_bytes(server.pid)
    most_bytes, seconds = 0, []
    async with httpx2.AsyncClient(base_url=server.url, timeout=600) as client:
        alone = {model: await text(client, model) for model in models}
        waiting = iter(random.Random(seed).choices(models, k=num_requests))

        async def one_client() -> None:
            nonlocal most_bytes
            for model in waiting:
                began_s = time.perf_counter()
                assert await text(client, model) == alone[model], "an answer is not its model's"
                seconds.append(time.perf_counter() - began_s)
                most_bytes = max(most_bytes, resident_bytes(server.pid))

        began_s = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(NUM_CLIENTS)))
        passed_s = time.perf_counter() - began_s
        metrics = (await client.get("/metrics")).text
    loads = sum(float(count) for count in re.findall(r"^mlxcel_model_loads_total\{.*\} (\S+)$", metrics, re.M))
    most_s = quantiles(seconds, n=10)[-1]
    print(f"{num_requests} requests of {NUM_CLIENTS} clients, all right, in {passed_s:.1f} s; {loads:.0f} loads")
    print(f"a request: {median(seconds):.2f} s, nine tenths below {most_s:.2f} s, longest {max(seconds):.2f} s")
    print(f"resident: {before_bytes / 1e6:.0f} MB before the first load, at most {most_bytes / 1e6:.0f} MB")


async def text(client: httpx2.AsyncClient, model: str) -> str:
    response = await client.post("/v1/completions", json={**BODY, "model": model})
    response.raise_for_status()
    said: str = response.json()["choices"][0]["text"]
    return said


if __name__ == "__main__":
    main()
