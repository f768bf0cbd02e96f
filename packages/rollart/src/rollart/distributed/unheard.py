"""Failures of calls that nobody waits for, or waits for any more: a line of the log each, where Ray prints a page.

Held by tests/rollart/test_rollart_distributed_cluster.py::test_a_failure_that_nobody_waits_for_is_one_line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollart.distributed.carry import Carried
from rollart.distributed.host import OWN

log = logging.getLogger(__name__)


def tell_in_a_line() -> None:
    """From now on; failures of actors that are not ours are told as before, and all where Ray has no such handler."""
    from ray._private import worker

    before = getattr(worker, "_unhandled_error_handler", None)
    if before is not None and not getattr(before, "is_ours", False):
        worker._unhandled_error_handler = _teller(before)


def _teller(before: Callable[[Exception], None]) -> Callable[[Exception], None]:
    def tell(error: Exception) -> None:
        cause = getattr(error, "cause", None)
        if not isinstance(cause, Carried):
            return before(error)
        method = error.function_name.rpartition(".")[2].removeprefix(OWN)  # type: ignore[attr-defined]
        log.error("%s raised in %s, and nobody waited for it: %s", cause.who, method, cause.line)

    tell.is_ours = True  # type: ignore[attr-defined]
    return tell
