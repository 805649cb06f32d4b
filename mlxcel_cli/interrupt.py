"""What keys do while the chat or an answer runs: Ctrl-C stops it, others wait for the next prompt."""

import asyncio
import signal
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


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


@contextmanager
def unechoed(stdin: TextIO | None) -> Iterator[None]:
    """Within the block, a terminal behind `stdin` does not show what is typed, Ctrl-C included."""
    if stdin is None or not stdin.isatty():
        yield
        return
    descriptor = stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
