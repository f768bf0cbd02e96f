"""`llmproxy serve` runs the gateway, `llmproxy standin` a server to try it with."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from .config import ProxyConfig
from .dialects import DIALECTS
from .gateway import Gateway, GatewayConfig
from .http_worker import HTTPWorker
from .path_loader import PathLoader
from .proxy import LLMProxy
from .routing import AffinityRouter
from .standin import StandIn
from .worker import WeightLoader

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_EPILOG = """\
To try it, without an engine:

  llmproxy standin --port 8101 &
  llmproxy serve --worker http://127.0.0.1:8101 --record
  curl 127.0.0.1:8000/v1/completions -H 'x-trajectory-id: t1' -d '{"prompt": "hello", "max_tokens": 8}'
  curl 127.0.0.1:8000/trajectories/t1

With vLLM, and weights that a trainer writes to /checkpoints/1, /checkpoints/2, ...:

  VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --port 8101
  llmproxy serve --worker http://127.0.0.1:8101,hardware=H800 --weights '/checkpoints/{version}'
  curl -X POST 127.0.0.1:8000/admin/suspend
  curl -X POST 127.0.0.1:8000/admin/update -d '{"version": 1}'
  curl -X POST 127.0.0.1:8000/admin/resume

what clients send:
  x-trajectory-id   the trajectory; its turns go to one worker, and nothing of the body is read here
  x-task            by which --affinity picks a hardware class
  Without x-trajectory-id the body is read and checked; it may hold "trajectory_id" and "task".

endpoints:
  POST /v1/completions /v1/chat/completions /inference/v1/generate   passed to a worker, byte for byte
  POST /generate                        a whole generation, continued elsewhere when its worker is lost
  GET  /health /metrics /workers /v1/models
  GET  /trajectories, GET or DELETE /trajectories/ID                 with --record
  POST /admin/suspend /admin/resume     the barrier around a weight update
  POST /admin/prefetch /admin/update    {"version": N}
  POST /admin/abort /admin/interrupt    {"id": TRAJECTORY or REQUEST}
  POST /admin/workers {"url": ..., "id": ..., "hardware": ...}, DELETE /admin/workers/ID

environment:
  LLMPROXY_API_KEY       asked of clients, as "authorization: Bearer KEY"
  LLMPROXY_ADMIN_TOKEN   asked of callers of /admin; without it only callers on this host are served there
  LLMPROXY_WORKER_KEY    sent to workers
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="llmproxy", description="A trajectory-level gateway over inference servers.")
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="run the gateway",
        description="Route requests of trajectories to inference servers, around weight updates.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = serve.add_argument
    add(
        "--worker",
        action="append",
        default=[],
        metavar="URL[,hardware=CLASS][,id=NAME][,dialect=vllm|sglang|openai]",
        help="an inference server; repeat for each",
    )
    add(
        "--affinity",
        action="append",
        default=[],
        metavar="TASK=CLASS",
        help="hardware class of a task, or of 'default'",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    add("--record", action="store_true", help="keep each trajectory's tokens, log-probabilities and versions")
    add("--record-gb", type=float, default=1.0, metavar="GB", help="memory for records (default: %(default)s)")
    add("--max-body-mb", type=float, default=64.0, metavar="MB", help="longest request body (default: %(default)s)")
    add("--max-connections", type=int, default=4096, metavar="N", help="clients at one time (default: %(default)s)")
    add("--request-timeout", type=float, default=3600.0, metavar="S", help="longest answer (default: %(default)s)")
    add(
        "--patience", type=float, default=60.0, metavar="S", help="wait for a worker, then 503 (default: %(default)s)"
    )
    add(
        "--silence",
        type=float,
        default=10.0,
        metavar="S",
        help="a worker is lost without a sign of life for so long (default: %(default)s)",
    )
    add(
        "--drain",
        type=float,
        default=30.0,
        metavar="S",
        help="on SIGTERM, time for what is under way (default: %(default)s)",
    )
    add("--on-failure", choices=("fence", "fail"), default="fence", help="when a worker fails an update")
    add("--version", type=int, default=0, metavar="N", help="that of the weights the servers start with (default: 0)")
    add("--weights", metavar="TEMPLATE", help="folder of a version, holding {version}, that vLLM loads at an update")
    add("--loader", metavar="MODULE:FUNCTION", help="makes a weight loader for each worker; called with its URL")
    add("--insecure", action="store_true", help="listen beyond this host without LLMPROXY_API_KEY")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    standin = commands.add_parser(
        "standin", help="a server that answers like vLLM and has no model, to try things with"
    )
    standin.add_argument("--host", default="127.0.0.1")
    standin.add_argument("--port", type=int, default=8101)
    standin.add_argument("--delay", type=float, default=0.0, metavar="S", help="before each token")
    return top


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    logging.basicConfig(level=options.log_level.upper() if "log_level" in options else "INFO", format="%(message)s")
    try:
        _run(_serve(options) if options.command == "serve" else _standin(options))
    except (ValueError, OSError) as error:
        print(f"llmproxy: {error}", file=sys.stderr)
        return 2
    return 0


def _run(program: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(program)
    else:
        uvloop.run(program)


async def _serve(options: argparse.Namespace) -> None:
    config = GatewayConfig(
        api_key=os.environ.get("LLMPROXY_API_KEY", ""),
        admin_token=os.environ.get("LLMPROXY_ADMIN_TOKEN", ""),
        max_body=int(options.max_body_mb * 1e6),
        max_connections=options.max_connections,
        request_timeout=options.request_timeout,
        record=options.record,
        record_bytes=int(options.record_gb * 1e9),
    )
    if options.host not in _LOOPBACK and not config.api_key and not options.insecure:
        raise ValueError(f"listening on {options.host} needs LLMPROXY_API_KEY; --insecure serves everybody")
    affinity = dict(_pair(text) for text in options.affinity)
    proxy = LLMProxy(
        router=AffinityRouter(affinity),
        config=ProxyConfig(on_failure=options.on_failure, patience=options.patience),
        version=options.version,
    )
    make = _maker(options)
    gateway = Gateway(proxy, config, make)
    workers = [make(*_worker(text, options.version)) for text in options.worker]
    port = await gateway.start(options.host, options.port)
    try:
        for worker in workers:
            gateway.expect(worker)
        _collect_rarely()
        print(f"serving on http://{options.host}:{port}", flush=True)
        await _signalled()
        print("draining", flush=True)
        await gateway.drain(options.drain)
    finally:
        await gateway.close()
        await proxy.close()
        for worker in {*workers, *map(gateway.worker, proxy.workers())}:
            await worker.close()


async def _standin(options: argparse.Namespace) -> None:
    server = StandIn(delay=options.delay)
    port = await server.start(options.host, options.port)
    print(f"standing in on http://{options.host}:{port}", flush=True)
    await _signalled()
    await server.close()


def _collect_rarely() -> None:
    """What lives now lives on, and requests end by reference count: the collector need not look often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _signalled() -> None:
    """Until SIGTERM or SIGINT."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    await asked.wait()


def _maker(options: argparse.Namespace) -> Callable[[str, str, str, str, int], HTTPWorker]:
    if options.weights and options.loader:
        raise ValueError("--weights and --loader exclude each other")
    load = _loader_factory(options)

    def make(url: str, id: str, hardware: str, dialect: str, version: int) -> HTTPWorker:
        return HTTPWorker(
            url,
            id=id,
            hardware=hardware,
            dialect=DIALECTS[dialect](),
            loader=load(url),
            api_key=os.environ.get("LLMPROXY_WORKER_KEY", ""),
            version=version,
            silence=options.silence,
        )

    return make


def _loader_factory(options: argparse.Namespace) -> Callable[[str], WeightLoader | None]:
    if options.weights:
        loader = PathLoader(options.weights)
        return lambda url: loader
    if not options.loader:
        return lambda url: None
    module, _, name = options.loader.partition(":")
    try:
        factory: Callable[[str], WeightLoader] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--loader {options.loader}: {error}; give MODULE:FUNCTION") from error
    return factory


def _worker(text: str, version: int) -> tuple[str, str, str, str, int]:
    """(url, id, hardware, dialect, version) of a --worker."""
    url, *rest = text.split(",")
    given = dict(_pair(item) for item in rest)
    unknown = given.keys() - {"id", "hardware", "dialect"}
    if unknown:
        raise ValueError(f"--worker {text}: {sorted(unknown)[0]!r} is none of hardware, id, dialect")
    dialect = given.get("dialect", "vllm")
    if dialect not in DIALECTS:
        raise ValueError(f"--worker {text}: dialect {dialect!r} is none of {', '.join(DIALECTS)}")
    return url, given.get("id", ""), given.get("hardware", "any"), dialect, version


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
