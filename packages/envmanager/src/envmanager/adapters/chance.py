"""Random sources of their own for environments of libraries that draw from the global ones.

Invariant: what such an environment draws depends on its seed and its actions only, not on others that step between
(test_envmanager_adapters.py::test_side_by_side_as_alone). The swap is around calls on the loop: in threads it would
not be safe.
"""

import random
import sys
from types import TracebackType
from typing import Any


def _numpy() -> Any:
    """NumPy's global source, where NumPy is loaded."""
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None else None


class OwnChance:
    """`with chance:` the global sources are this environment's."""

    def __init__(self, seed: int = 0) -> None:
        self._python: Any = random.Random(seed).getstate()
        numpy = _numpy()
        self._numpy: Any = numpy.RandomState(seed).get_state() if numpy else None

    def __enter__(self) -> None:
        self._swap()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._swap()

    def _swap(self) -> None:
        outer = random.getstate()
        random.setstate(self._python)
        self._python = outer
        if (numpy := _numpy()) is not None:
            state = numpy.get_state()
            if self._numpy is not None:
                numpy.set_state(self._numpy)
            self._numpy = state
