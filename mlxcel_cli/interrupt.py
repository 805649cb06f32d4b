"""What Ctrl-C does while something asynchronous runs."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupt_calls(call: Callable[[], Any]) -> Iterator[None]:
    """Within the block, SIGINT runs `call` on the event loop in place of raising KeyboardInterrupt."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
