"""Running parts of a test on threads of their own."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx


def in_threads(count: int, target: Callable[[int], None]) -> None:
    """Calls target(0) to target(count - 1) at once; what was raised in any of them is raised here."""
    faults: list[Exception] = []

    def call(number: int) -> None:
        try:
            target(number)
        except Exception as fault:  # noqa: BLE001 - handed over below
            faults.append(fault)

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call hangs"
    if faults:
        raise faults[0]


def aside(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test that has MLX's own thread fail, beside the main thread.

    An error that MLX meets while the main thread hands it more work costs its scheduler the count of a task. A
    later evaluation in this process may then wait for ever for that task to end.
    """

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        def beside(_: int) -> None:
            try:
                test(*arguments, **named)
            finally:
                mx.clear_streams()

        in_threads(1, beside)

    return run
