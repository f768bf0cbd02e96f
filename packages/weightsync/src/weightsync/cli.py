"""The command `weightsync`."""

from __future__ import annotations

import argparse
import asyncio
import sys

import msgspec

from weightsync.errors import StoreUnavailable, WeightSyncError
from weightsync.inspection import VersionInfo, inspect
from weightsync.urls import folder_of, open_store

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Returns 0; 1 when an object is bad; 2 when the store cannot be read."""
    parser = argparse.ArgumentParser(prog="weightsync", description="Versions of model weights in a store.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="list the versions of a store and verify every object")
    command.add_argument("store", help="shm:NAME, file:DIR or mooncake://HOST:PORT[/NAMESPACE]")
    command.add_argument("--no-verify", action="store_true", help="list only, read no bucket")
    command.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    try:
        versions = asyncio.run(_inspect(options.store, not options.no_verify))
    except WeightSyncError as error:
        print(f"weightsync: {error}", file=sys.stderr)
        return 2
    lines = [msgspec.json.encode(info).decode() for info in versions] if options.json else _table(versions)
    print("\n".join(lines))
    return 1 if any(info.bad for info in versions) else 0


async def _inspect(url: str, verify: bool) -> list[VersionInfo]:
    folder = folder_of(url)
    if folder is not None and not folder.is_dir():  # a publisher makes it; to look is not to make
        raise StoreUnavailable(f"there is no store at {url}")
    store = open_store(url)
    try:
        return await inspect(store, verify=verify)
    finally:
        await store.close()


def _table(versions: list[VersionInfo]) -> list[str]:
    rows = [("version", "base", "tensors", "buckets", "bytes", "wire bytes", "changed", "digest", "state")]
    for info in versions:
        rows.append(
            (
                str(info.version),
                "-" if info.base is None else str(info.base),
                str(info.tensors),
                str(info.buckets),
                str(info.content_bytes),
                str(info.wire_bytes),
                f"{info.density:.3%}",
                info.digest,
                f"BAD buckets {list(info.bad)}" if info.bad else "good",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
