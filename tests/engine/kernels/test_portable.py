"""MLX's compiled operations are kept in a private folder, all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import sys, tempfile
from pathlib import Path
import mlx.core as mx
from engine.kernels import portable
print(portable.prepare(Path(sys.argv[1])))
mx.eval(mx.compile(lambda x: mx.tanh(x) - x * 0.37)(mx.ones((4,))))
print(tempfile.gettempdir())
"""


@pytest.fixture
def compiled(tmp_path):
    (tmp_path / "temporary").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path / "kernels")],
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    return tmp_path, ended.stdout.splitlines()


def test_all_objects_lie_in_the_private_folder(compiled):
    folder, (note, temporary) = compiled
    if "no working C++ compiler" in note:
        pytest.skip(note)
    assert len(list((folder / "kernels").rglob("*.so"))) == 2
    assert (folder / "kernels").stat().st_mode & 0o077 == 0
    assert not list((folder / "temporary").iterdir())
    assert temporary == str(folder / "temporary")
