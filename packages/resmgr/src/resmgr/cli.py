"""The command `resmgr`: look at a store, serve its metrics, fill it from a file, stop an embedded one."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import msgspec

from resmgr.errors import EventsLost, PoolMismatch, ResmgrError, StoreMismatch, StoreUnavailable
from resmgr.events import watch
from resmgr.manager import ResourceManager
from resmgr.metrics import MetricsServer
from resmgr.static import load_pools
from resmgr.status import SCHEMA, Status, read_status
from resmgr.store import Store
from resmgr.table import render


def main(arguments: list[str] | None = None) -> int:
    """Returns 0; 2 when the store cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        asyncio.run(options.run(options))
    except (
        BrokenPipeError
    ):  # whoever read our output has seen enough; the interpreter's own flush is not to fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ResmgrError as error:
        print(f"resmgr: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="resmgr", description="Pools, bindings and leases of a shared store.")
    commands = parser.add_subparsers(required=True)

    def add(name: str, about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about)
        command.add_argument("url", help="redis://HOST:PORT/DB, unix://PATH or embedded:DIR")
        command.add_argument("--namespace", default="resmgr", help="of the keys in the store (default: resmgr)")
        return command

    status = add("status", "print pools, bindings and the queue")
    status.add_argument("--watch", action="store_true", help="print again whenever something happens")
    status.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    status.set_defaults(run=_status)
    serve = add("serve", "answer Prometheus scrapes")
    serve.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=9477, help="0 for any that is free (default: 9477)")
    serve.set_defaults(run=_serve)
    apply = add("apply", "register the pools of a YAML file")
    apply.add_argument("file", help="pool names mapped to hardware, total or nodes, labels, backend")
    apply.add_argument("--replace", action="store_true", help="also pools that are registered with other totals")
    apply.set_defaults(run=_apply)
    add("stop", "stop the server of embedded:DIR, whoever started it").set_defaults(run=_stop)
    return parser


@contextlib.asynccontextmanager
async def _store(options: argparse.Namespace) -> AsyncIterator[Store]:
    store = Store(options.url, options.namespace, patience=5.0)
    try:
        _check_there(store)
        await store.open()
        yield store
    finally:
        await store.close()


def _check_there(store: Store) -> None:
    """Looking at a folder makes no store of it."""
    if store.server and not os.path.exists(store.server.directory / "lock"):
        raise StoreUnavailable(f"there is no store at {store.server.directory}; `resmgr apply` makes one")


async def _read(store: Store) -> Status:
    status = read_status(await store.call("snapshot"))
    if status.schema not in ("", SCHEMA):
        raise StoreMismatch(f"{store.url} holds schema version {status.schema}, this command reads {SCHEMA}")
    return status


def _show(status: Status, options: argparse.Namespace) -> None:
    print(msgspec.json.encode(status).decode() if options.json else render(status), flush=True)


async def _status(options: argparse.Namespace) -> None:
    async with _store(options) as store:
        status = await _read(store)
        _show(status, options)
        while options.watch:
            with contextlib.suppress(EventsLost):  # more has happened than is kept: the table shows what came of it
                async with contextlib.aclosing(watch(store, status.position)) as events:
                    await anext(events)
            status = await _read(store)
            print()
            _show(status, options)


async def _serve(options: argparse.Namespace) -> None:
    async with _store(options) as store:
        await _read(store)
        server = await MetricsServer(lambda: _read(store)).start(options.host, options.port)
        port = server.sockets[0].getsockname()[1]
        print(f"http://{options.host}:{port}/metrics", flush=True)
        async with server:
            await server.serve_forever()


async def _apply(options: argparse.Namespace) -> None:
    pools = load_pools(options.file)
    async with await ResourceManager.connect(options.url, namespace=options.namespace, patience=5.0) as manager:
        others = []
        for pool in pools:
            try:
                await manager.register(pool, replace=options.replace)
            except PoolMismatch as error:
                others.append(str(error))
            else:
                total = pool.total or sum(node.total for node in pool.nodes)
                print(f"{pool.name}: {total:g} of {pool.hardware}", flush=True)
        if others:
            raise PoolMismatch("\n".join([*others, "(with --replace these pools are put in place of the old ones)"]))


async def _stop(options: argparse.Namespace) -> None:
    store = Store(options.url, options.namespace)
    if store.server is None:
        raise StoreUnavailable(f"{options.url} is not embedded:DIR; stop that server where it was started")
    try:
        _check_there(store)
        stopped = await store.shutdown()
        print(f"{store.server.directory}: {'stopped' if stopped else 'no server runs here; stopped already'}")
    finally:
        await store.close()
