"""Ctrl-C: the first asks the run to end with a checkpoint, the second ends it at once.

A second one leaves no process behind either: everything that a run starts dies with the driver
(tests/integration/test_integration_manners.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130
_SHOW_CURSOR = b"\x1b[?25h" if sys.stdout is not None and sys.stdout.isatty() else b""


@contextmanager
def interruptible(tell: Callable[[str], None]) -> Iterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets; `tell` says to the person what happens now."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def asked() -> None:
        if stop.is_set():
            os.write(1, _SHOW_CURSOR)
            os._exit(EXIT_INTERRUPTED)
        tell("stopping: a step under way is finished and a checkpoint written (Ctrl-C again ends at once)")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
