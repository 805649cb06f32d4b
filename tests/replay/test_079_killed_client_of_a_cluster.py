"""Case 79: the client of a stream that several processes give is killed; the node that works hears of it within a
second and does not go on to the answer's bound.
"""

import subprocess
import sys
import time
from pathlib import Path

import httpx2

from tests.cluster import Cluster, cluster, until
from tests.tiny import write_checkpoint

BOUND = 3000
CLIENT = """
import sys, httpx2
body = {"prompt": "a question", "max_tokens": %d, "ignore_eos": True, "stream": True, "temperature": 0}
with httpx2.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=60) as response:
    for number, line in enumerate(response.iter_lines()):
        if number == 40:
            print("streams", flush=True)
"""


def decoded(one: Cluster, name: str) -> int:
    """How many tokens a node has given to the requests that it runs."""
    slots = httpx2.get(f"{one.nodes[name].url}/slots", timeout=60).json()
    return sum(slot["next_token"][0]["n_decoded"] for slot in slots if slot["is_processing"])


def test_the_node_that_works_hears_of_it(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    with cluster(model, tmp_path / "cluster", prefill=1, decode=1) as one:
        command = [sys.executable, "-c", CLIENT % BOUND, one.router.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "streams\n"
            assert 0 < decoded(one, "decode-0") < BOUND
            client.kill()
            client.wait()
            killed_s = time.monotonic()
            until(lambda: one.idle("decode-0"), "the decode node idle")
            assert time.monotonic() - killed_s < 1
        assert one.idle("prefill-0")
        assert one.metric("decode-0", 'mlxcel_requests_total{outcome="cancelled"}') == 1
        assert one.metric("decode-0", "mlxcel_completion_tokens_total") < BOUND
