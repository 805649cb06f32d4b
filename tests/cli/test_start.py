"""Help, listings and removals load neither MLX nor transformers and answer at once."""

import resource
import subprocess
import sys

import pytest

HEAVY = ("mlx", "mlx_lm", "transformers", "httpx2", "prompt_toolkit", "starlette", "uvicorn", "llguidance")
PROGRAM = "from mlxcel_cli.main import main; main()"
BARE = "import typer, pydantic.types"  # what Typer needs for a command with an argument
MOST_TIMES = 2.5  # of the time that this takes by itself
MOST_TRIES = 10  # on a busy machine; one is enough on another
SHOW_MODULES = (
    "import sys\n"
    "from mlxcel_cli.main import main\n"
    "try:\n    main(sys.argv[1:])\n"
    "except SystemExit as end:\n    code = end.code\n"
    "print('loaded', *{name.partition('.')[0] for name in sys.modules})\n"
    "sys.exit(code)"
)


def start(code: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 0),
        (["--help"], 0),
        (["--version"], 0),
        (["list"], 0),
        (["list", "--json"], 0),
        (["list", "--sort", "size", "--reverse"], 0),
        (["rm", "nothing"], 1),
        (["cp", "nothing", "other"], 1),
        (["convert", "--help"], 0),
        (["convert", "nothing", "--bits", "7"], 1),
        (["run", "--help"], 0),
        (["chat", "--help"], 0),
        (["generate", "--help"], 0),
        (["serve", "--help"], 0),
        (["pull", "--help"], 0),
        (["inspect", "--help"], 0),
        (["bench", "--help"], 0),
    ],
    ids=str,
)
def test_loads_nothing_heavy(arguments, code):
    ended = start(SHOW_MODULES, arguments)
    assert ended.returncode == code, ended.stderr
    loaded = ended.stdout.splitlines()[-1].split()
    assert loaded[0] == "loaded"
    assert not set(HEAVY).intersection(loaded)


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["rm", "nothing"], ["cp", "nothing", "x"]], ids=str)
def test_answers_at_once(arguments):
    def seconds(code: str) -> float:
        """Time on the processor: what else runs here takes none of it, but slows it down on a shared core."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start(code, arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    bare, ours = seconds(BARE), seconds(PROGRAM)
    for _ in range(MOST_TRIES):
        if ours < MOST_TIMES * bare:
            break
        bare, ours = min(bare, seconds(BARE)), min(ours, seconds(PROGRAM))
    assert ours < MOST_TIMES * bare
