"""Whatever its OpenAPI document allows, and what it forbids, is sent to a served tiny model, until time is up.

`python -m tests.fuzz SECONDS`, or `make fuzz`. No answer may be a fault of the server's, or take long.
"""

import sys
import tempfile
import time
from pathlib import Path

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode

from server.openapi import OPERATIONS
from tests.serving import live
from tests.tiny import write_checkpoint

LONGEST_S = 30.0
EXAMPLES = 5  # of an operation and mode, before the next has its turn
ANSWERS = (200, 400, 404, 405, 501)


def fuzz(checkpoint: Path, seconds: float, *, seed: int = 0) -> dict[str, int]:
    """Ask for `seconds`, and each operation once whatever that takes; how often each status came for each of them.

    An assertion fails at the first fault.
    """
    counts: dict[str, int] = {}
    with live(checkpoint, ctx_size=64, server={"request_timeout": LONGEST_S}) as server:
        with server.client() as client:
            document = client.get("/openapi.json").json()
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=server.base_url)
        operations = [found.ok() for found in schema.get_all_operations()]
        endless = [f"{method} {path}" for (method, path), said in OPERATIONS.items() if said.endless]
        operations = [operation for operation in operations if operation.label not in endless]
        end_s = time.monotonic() + seconds
        with requests.Session() as session:
            for turn in range(1 << 30):
                for operation in operations:
                    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                        if turn and time.monotonic() > end_s:
                            return counts
                        _ask(operation, mode, session, end_s, counts, seed + turn, EXAMPLES if turn else 1)
    return counts


def _ask(
    operation: schemathesis.APIOperation,
    mode: GenerationMode,
    session: requests.Session,
    end_s: float,
    counts: dict[str, int],
    seed: int,
    examples: int,
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        if examples > 1 and time.monotonic() > end_s:
            return
        response = case.call(session=session, timeout=LONGEST_S)
        told = f"{operation.label} {response.status_code}"
        counts[told] = counts.get(told, 0) + 1
        assert response.status_code in ANSWERS, f"{case.as_curl_command()}\n{response.text}"

    try:
        ask()
    except hypothesis.errors.Unsatisfiable:  # nothing is forbidden there
        return


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        told = fuzz(write_checkpoint(Path(folder)), float(sys.argv[1]))
    for line, count in sorted(told.items()):
        sys.stdout.write(f"{count:6} {line}\n")
