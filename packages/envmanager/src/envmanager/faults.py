"""What code that is not ours raises: whether it is its own doing, and how it is told.

Invariant: whatever an environment, a policy or a reward raises is a typed failure of its own episode, and of no other
(test_envmanager_faults.py).
"""

import asyncio

TEXT = 500  # characters shown of an exception


def foreign(error: BaseException) -> bool:
    """Whether the called code raised it by itself: not where its caller's task is cancelled, or Python told to stop.
    A CancelledError that nobody asked for is a failure; taken for a cancellation, it would be replaced without end.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit)


def told(error: BaseException) -> str:
    """An exception's type and the start of its text, encodable, and also where asking for the text raises."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(its text raised {type(second).__name__})"
    return f"{type(error).__name__}: {text[:TEXT]}".encode(errors="replace").decode()
