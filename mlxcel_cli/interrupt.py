"""What Ctrl-C does while the chat or an answer runs."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupt_calls(call: Callable[[], Any]) -> Iterator[None]:
    """Within the block, SIGINT runs `call` on the event loop; afterwards it does what it did before."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupt_ignored() -> Iterator[None]:
    """Within the block, SIGINT does nothing but what inner blocks and the keyboard make of it."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
