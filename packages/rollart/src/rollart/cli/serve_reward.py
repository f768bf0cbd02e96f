"""`rollart serve-reward`: one function behind HTTP until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollart.serverless import Settings

TOKEN_VARIABLE = "ROLLART_SERVE_TOKEN"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve-reward",
        help="serve a reward function over HTTP, with processes that come and go with demand",
        description="Serve MODULE:FUNCTION, e.g. rollart.serverless.rewards:math_reward, by POST / and POST "
        f"/function/NAME. The token may also be in {TOKEN_VARIABLE}. SIGTERM lets calls under way end.",
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION")
    parser.add_argument("--host", default="127.0.0.1", help="elsewhere than on loopback a token is needed")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one (default: 8080)")
    parser.add_argument("--token", default="", help=f"callers must give it as a bearer token ({TOKEN_VARIABLE})")
    parser.add_argument("--workers", type=int, help="processes at most (default: the number of CPUs)")
    parser.add_argument("--least", type=int, default=0, help="processes that are always there (default: 0)")
    parser.add_argument("--queue", type=int, default=64, help="calls that may wait; more get 429 (default: 64)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of one call (default: 60)")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds until an idle process ends (default: 60)")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds that calls may go on at the end")
    parser.set_defaults(command=serve_reward)


def serve_reward(arguments: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM. Raises BadFunction before anything listens."""
    from rollart.serverless import Settings

    fields = ("function", "host", "port", "least", "queue", "timeout", "idle", "drain")
    more = {"workers": arguments.workers} if arguments.workers is not None else {}
    token = arguments.token or os.environ.get(TOKEN_VARIABLE, "")
    settings = Settings(**{name: getattr(arguments, name) for name in fields}, token=token, **more)
    asyncio.run(_serve(settings))
    return 0


async def _serve(settings: Settings) -> None:
    from rollart.serverless import FunctionServer

    await _check(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with FunctionServer(settings) as server:
        print(f"{settings.function} at {server.url}/function/{settings.name}", flush=True)
        await stop.wait()


async def _check(settings: Settings) -> None:
    """Imports the function once in a process of its own: a wrong name is told now, not to the first caller."""
    import msgspec

    from rollart.serverless import BadFunction, WorkerLost
    from rollart.serverless.workers import Workers

    probe = Workers(msgspec.structs.replace(settings, workers=1, least=1))
    try:
        await probe.warm()
    except WorkerLost as error:
        reason = str(error).removeprefix(settings.function)
        raise BadFunction(f"function={settings.function!r}{reason}; name one that Python can import here") from None
    finally:
        await probe.close()
