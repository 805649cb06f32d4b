"""MLX's own operations, and what they need from the machine.

On a CPU, MLX compiles fused operations with the system's C++ compiler when they are first used, and keeps the
shared objects in a folder of the temporary directory whose name anybody can guess. Here that folder is a
private one, and a machine without a compiler runs the same operations unfused.
"""

import os
import tempfile
from pathlib import Path

import mlx.core as mx


def prepare(folder: Path) -> str:
    """Set MLX up for this process; `folder` holds compiled operations between runs.

    Returns what the start-up line adds about it.
    """
    if mx.default_device() != mx.cpu or _compiles_in(folder):
        return ""
    mx.disable_compile()
    return ", unfused (no working C++ compiler)"


def _compiles_in(folder: Path) -> bool:
    """Have MLX keep its shared objects in `folder`, and try that with a first operation.

    MLX asks for the temporary directory whenever it compiles, so the variable stays set where that works; Python's
    own notion of the temporary directory is settled before.
    """
    tempfile.gettempdir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="mlxcel-"))
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) * x + 1, shapeless=True)(mx.ones((4,))))
    except RuntimeError:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        return False
    return True
