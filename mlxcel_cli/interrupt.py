"""What keys and signals do while the chat or an answer runs: Ctrl-C stops it, others wait for the next prompt, and
whoever ends the process leaves the terminal as it was.
"""

import asyncio
import os
import signal
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

ENDS = (signal.SIGTERM, signal.SIGHUP)


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
def leaves_cleanly() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP cancel the task; once it has left, they end the process as they would.

    A second one ends it at once. Who has been told to ignore one goes on to do so.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "coroutines run in tasks"
    heard = [number for number in ENDS if signal.getsignal(number) is signal.SIG_DFL]
    received: list[int] = []

    def leave(number: int) -> None:
        received.append(number)
        unheard()
        task.cancel()

    def unheard() -> None:
        for number in heard:
            loop.remove_signal_handler(number)

    for number in heard:
        loop.add_signal_handler(number, leave, number)
    try:
        yield
    finally:
        unheard()
        if received:
            os.kill(os.getpid(), received[0])


@contextmanager
def unechoed(stdin: TextIO | None) -> Iterator[None]:
    """Within the block, a terminal behind `stdin` does not show what is typed, and keeps it, also at Ctrl-C."""
    if stdin is None or not stdin.isatty():
        yield
        return
    descriptor = stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[3] = quiet[3] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
