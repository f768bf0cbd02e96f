"""A worker's process: imports the function once, then answers one call after another.

Run as `python -P worker.py MODULE:FUNCTION PARENT`, by its path, so that nothing is imported but what it needs: that
is the cold start. Calls come in by standard input, answers leave by what was standard output; what the function
prints goes to standard error. The process ends when its input does, and on Linux with its parent, however that ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

LENGTH_BYTES = 4
READY = b"ready"


class Answer(msgspec.Struct, array_like=True):
    """`code` 200 with the JSON `body`, or what went wrong in `text`."""

    code: int
    body: bytes = b""
    text: str = ""


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def load(target: str) -> Callable[[Any], Any]:
    """Raises what the import raises, or AttributeError."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is of type {type(function).__name__}; name a function of one argument")
    found: Callable[[Any], Any] = function
    if not _takes_one(found):
        raise TypeError(f"{target}{inspect.signature(found)} cannot be called with one argument, the call's body")
    return found


def _takes_one(function: Callable[[Any], Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a builtin that does not tell
        return True
    return True


def parameter_type(function: Callable[[Any], Any]) -> Any:
    """What the body is decoded as: the annotation of the function's parameter, else plain JSON."""
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        return Any
    first = next(iter(inspect.signature(function).parameters), "")
    return inspect.get_annotations(function, eval_str=True).get(first, Any)


class Server:
    """Answers calls with one function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(parameter_type(function))
        self._loop = asyncio.new_event_loop()

    def answer(self, body: bytes) -> Answer:
        try:
            argument = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return Answer(400, text=f"the body is not what the function takes: {error}")
        try:
            value = self._function(argument)
            if inspect.isawaitable(value):
                value = self._loop.run_until_complete(_awaited(value))
            return Answer(200, encoded(value))
        except (Exception, SystemExit) as error:
            text = str(error)[:1000].encode(errors="replace").decode()
            return Answer(500, text=f"the function raised {type(error).__name__}: {text}")


async def _awaited(value: Any) -> Any:
    return await value


def encoded(value: Any) -> bytes:
    """A number is a reward; anything else must be JSON by itself."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, bool | int | float):
        if not math.isfinite(value):
            raise ValueError(f"the function returned {value}; return a finite number")
        return msgspec.json.encode({"reward": float(value)})
    if value is None:
        raise ValueError("the function returned None; return a number, or what JSON can say")
    body = msgspec.json.encode(value)
    if b"null" in body and not _finite(msgspec.to_builtins(value)):
        raise ValueError(f"the function returned {value!r:.1000}, which has a number that is not finite")
    return body


def _finite(value: Any) -> bool:
    """Whether JSON can say every number in a value; it has no word for the others but null."""
    if isinstance(value, dict):
        return all(map(_finite, [*value.keys(), *value.values()]))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _let_go(null: int, *pipes: BinaryIO) -> None:
    """A child that outlives this process is not to look like it."""
    for pipe in pipes:
        os.dup2(null, pipe.fileno(), inheritable=False)


def _serve(server: Server, calls: BinaryIO, answers: BinaryIO) -> None:
    own = os.getpid()
    while len(size := calls.read(LENGTH_BYTES)) == LENGTH_BYTES:
        body = calls.read(int.from_bytes(size, "little"))
        answer = server.answer(body)
        if os.getpid() != own:  # a child that the function forked came back from it: its parent gives the answer
            os._exit(0)
        answers.write(frame(msgspec.msgpack.encode(answer)))
        answers.flush()


def main() -> None:
    target, parent = sys.argv[1], int(sys.argv[2])
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is for the server, which ends this process
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=lambda: _let_go(null, calls, answers))
    try:
        server = Server(load(target))
    except Exception as error:  # whatever the import raises is for the server to tell
        answers.write(frame(_reason(error)))
        answers.flush()
        sys.exit(1)
    answers.write(frame(READY))
    answers.flush()
    _serve(server, calls, answers)


def _reason(error: Exception) -> bytes:
    """What the error is, and where in the function's own module it was raised."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
    last = frames[-1].filename, frames[-1].lineno
    where = "" if last[0] in (__file__, importlib.__file__) else f" ({last[0]}:{last[1]})"
    return f"{type(error).__name__}: {error}{where}".encode(errors="replace")


if __name__ == "__main__":
    main()
