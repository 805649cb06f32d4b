"""How long the executable takes to start beside the installed program: `python -m tests.bench.start dist/mlxcel`.

Both in turn, pair by pair: `--version`, `--help` and one token of an answer, in seconds by the clock and on the
processor, and the median of the pairs' ratios. Before that, the executable's first start into an empty folder.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from engine.model.pull import ensure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executable", type=Path)
    parser.add_argument("--installed", type=Path, default=Path(sys.executable).with_name("mlxcel"))
    parser.add_argument("--repeats", type=int, default=11)
    asked = parser.parse_args()
    executable, model = str(asked.executable.resolve()), str(ensure("smollm2-135m"))
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "MLXCEL_HOME": home}
        first = seconds([executable, "--version"], environment)
        print(f"first start: {first[0]:.2f} s by the clock, {first[1]:.2f} s on the processor")
        for arguments in (["--version"], ["--help"], ["run", model, "-n", "1", "-p", "Hello"]):
            commands = [[executable, *arguments], [str(asked.installed), *arguments]]
            for command in commands:
                seconds(command, environment)  # what is kept for later starts is written
            pairs = [[seconds(command, environment) for command in commands] for _ in range(asked.repeats)]
            said = f"{arguments[0]:10}"
            for which, name in ((0, "clock"), (1, "processor")):
                ours, installed = (median(pair[arm][which] for pair in pairs) for arm in (0, 1))
                ratio = median(pair[0][which] / pair[1][which] for pair in pairs)
                said += f"  {name} {ours:.3f} s beside {installed:.3f} s, {ratio:.2f} times"
            print(said)


def seconds(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """By the clock, and on the processor."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    passed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return passed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
