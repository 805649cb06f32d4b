"""What this machine gives an engine: MLX and its backend, the kernels, the threads.

`python -m engine.machine` says it as one JSON object, in a process of its own: what a broken MLX or a stale binary
does, happens there.
"""

import importlib.metadata
import json
import sys
from typing import Any


def machine(num_threads: int = 0) -> dict[str, Any]:
    """`num_threads` is the setting. `kernels` is what the start-up line says; `native`: they are compiled."""
    import mlx.core as mx

    from engine.kernels import native

    started = native.start(num_threads)
    device = mx.default_device()
    total = (mx.array([1.0, 2.0]) + 1).sum().item()
    return {
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "device": device.type.name,
        "computes": total == 5.0,
        "kernels": native.said(started),
        "native": isinstance(started, native.Native),
        "num_threads": started.num_threads if isinstance(started, native.Native) else native.usable_cores(),
        "cores": native.usable_cores(),
    }


if __name__ == "__main__":
    print(json.dumps(machine(int(sys.argv[1]) if len(sys.argv) > 1 else 0)))
