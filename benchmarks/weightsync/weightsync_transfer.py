"""Publish and pull against what the hardware, and others, do with the same bytes on the same machine.

python benchmarks/weightsync/weightsync_transfer.py [--quick] [--bucket MIB]

One interleaved run for each size of bucket: every round does everything once, so that the noise of a shared machine
hits all alike; medians of ratios within a round. Everything pulled is compared byte for byte. 1 GiB in buckets of 16,
64 and 256 MiB (--quick: 256 MiB in buckets of 64 MiB); --bucket measures one size and keeps what is known of others.

- shared memory against its physical limit: one copy into (out of) a mapped segment plus one checksum pass;
- Mooncake over TCP against the same store driven by hand (`put_from`, `get_into`, registered once);
- beside them memcpy, a raw TCP socket, Mooncake's TransferEngine and torch's gloo broadcast, as they are;
- a commit into a torch module, digest included, against memcpy; a published fraction says how much a pull exposes.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from _peers import RawTransports
from _results import Row, write

from weightsync import FileStore, Load, MemoryStore, Publisher, SharedMemoryStore, Store, Subscriber, ThrottledStore
from weightsync.checksum import checksum
from weightsync.mooncake import MooncakeStore
from weightsync.mooncake_master import MooncakeMaster
from weightsync.tensors import Bytes

QUICK = "--quick" in sys.argv
MIB = 1 << 20
SIZE = (256 if QUICK else 1024) * MIB
ALL = (64,) if QUICK else (64, 16, 256)
BUCKETS = (int(sys.argv[sys.argv.index("--bucket") + 1]),) if "--bucket" in sys.argv else ALL
ROUNDS = 5
# Two rounds make the pages that all later ones use again: a version is kept while the next one is written.
WARM = 2


class Times:
    """Seconds of each thing, one for every round, and those of this process's CPU."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    async def of(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        start, cpu = time.perf_counter(), time.process_time()
        result = await work()
        self._note(name, time.perf_counter() - start, time.process_time() - cpu)
        return result

    def sync(self, name: str, work: Callable[[], Any]) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        work()
        self._note(name, time.perf_counter() - start, time.process_time() - cpu)

    def _note(self, name: str, seconds: float, cpu: float) -> None:
        self.found.setdefault(name, []).append(seconds)
        self.cpu.setdefault(name, []).append(cpu)

    def rate(self, name: str) -> float:
        return SIZE / statistics.median(self.found[name]) / 1e9

    def row(self, name: str, peer: str, bound: float | None = None) -> Row:
        ratios = sorted(p / o for o, p in zip(self.found[name], self.found[peer], strict=True))
        return {
            "metric": name,
            "unit": "GB/s",
            "ours": self.rate(name),
            "peer": peer,
            "peer_value": self.rate(peer),
            "published": bound,
            "ratio": statistics.median(ratios),
            "spread": [ratios[0], ratios[-1]],
            "cpu_s": statistics.median(self.cpu[name]),
            "peer_cpu_s": statistics.median(self.cpu[peer]),
        }

    def plain(self, name: str) -> Row:
        rates = sorted(SIZE / seconds / 1e9 for seconds in self.found[name])
        spread = [rates[0], rates[-1]]
        nothing = dict.fromkeys(("peer", "peer_value", "published", "ratio"))
        return {"metric": name, "unit": "GB/s", "ours": self.rate(name), **nothing, "spread": spread}


def tensors(source: Bytes) -> dict[str, Bytes]:
    """One contiguous megabyte after another, as the weights of a model lie in memory."""
    return {f"layer.{number}": part for number, part in enumerate(source.reshape(-1, MIB))}


class Line:
    """A publisher and a subscriber on one store."""

    def __init__(self, name: str, store: Store, bucket: int) -> None:
        self.name = f"{name} {bucket} MiB"
        self.publisher = Publisher(store, bucket_bytes=bucket * MIB, keep=1)
        self.subscriber = Subscriber(store)
        self.keys: list[str] = []

    async def round(self, times: Times, version: int, source: Bytes, load: Load | None) -> None:
        named = tensors(source)
        manifest = await times.of(f"publish, {self.name}", lambda: self.publisher.publish(version, named))
        self.keys = [manifest.key(index) for index in range(len(manifest.buckets))]
        staged = await times.of(f"pull, {self.name}", lambda: self.subscriber.prefetch(version))
        assert np.array_equal(staged.staging.array, source), "content"
        if load is not None:
            await times.of("commit into a torch module", lambda: self.subscriber.commit(staged, load))


def physical(times: Times, source: Bytes, target: Bytes, segment: Bytes, bucket: int) -> None:
    """The limit of shared memory: a copy and a checksum, by one thread, on memory that is mapped already."""

    def publish() -> None:
        np.copyto(segment, source)
        checksum([source])

    def pull() -> None:
        np.copyto(target, segment)
        checksum([target])

    times.sync(f"copy in + checksum ({bucket})", publish)
    times.sync(f"copy out + checksum ({bucket})", pull)
    times.sync(f"memcpy ({bucket})", lambda: np.copyto(target, source))


def by_hand(times: Times, store: MooncakeStore, source: Bytes, target: Bytes, bucket: int) -> None:
    """Mooncake's own calls, with buffers registered once and outside of the clock, checksums included."""
    client, pin, step = store._client, store._pin, bucket * MIB
    keys = [f"hand:{uuid.uuid4().hex}" for _ in range(0, SIZE, step)]
    offsets = range(0, SIZE, step)
    for buffer in (source, target):
        assert client.register_buffer(buffer.ctypes.data, SIZE) == 0

    def put() -> None:
        for key, offset in zip(keys, offsets, strict=True):
            checksum([source[offset : offset + step]])
            assert client.put_from(key, source.ctypes.data + offset, step, pin) == 0

    def get() -> None:
        for key, offset in zip(keys, offsets, strict=True):
            assert client.get_into(key, target.ctypes.data + offset, step) == step
            checksum([target[offset : offset + step]])

    target[:] = 0
    times.sync(f"put_from, Mooncake by hand {bucket} MiB", put)
    times.sync(f"get_into, Mooncake by hand {bucket} MiB", get)
    assert np.array_equal(source, target), "content"
    for buffer in (source, target):
        client.unregister_buffer(buffer.ctypes.data)
    assert not any(client.batch_remove(keys, True))


def module_load() -> Load:
    """Into a torch module of the same tensors."""
    import torch

    from weightsync.torch import load_into

    parameters = torch.nn.ParameterDict()
    for number in range(SIZE // MIB):
        parameters[f"layer{number}"] = torch.nn.Parameter(torch.zeros(MIB, dtype=torch.uint8), requires_grad=False)
    return load_into(parameters, rename=lambda name: name.replace("layer", "layer."))


async def exposed_row(source: Bytes) -> Row:
    """A 100 MB/s link: what rollout waits for, as a share of what the pull takes in the background."""
    part = source[: 64 * MIB]
    line = Line("throttled", ThrottledStore(MemoryStore(), 100e6), 16)
    await line.publisher.publish(0, tensors(part))
    staged = await line.subscriber.prefetch(0)
    out = np.zeros_like(part)
    rows = iter(out.reshape(-1, MIB))
    report = await line.subscriber.commit(staged, lambda name, tensor: np.copyto(next(rows), tensor.data))
    assert np.array_equal(out, part), "content"
    await line.subscriber.close()
    exposed = report.seconds / staged.seconds
    return {
        "metric": "exposed share of a pull over a 100 MB/s link",
        "unit": "of accumulated",
        "ours": exposed,
        "peer": "bound",
        "peer_value": 0.05,
        "published": "0.22-0.33 (RollArt)",
        "ratio": 0.05 / exposed,
        "spread": f"pull {staged.seconds:.2f} s, exposed {report.seconds * 1e3:.1f} ms",
    }


async def main() -> list[Row]:
    source, target = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    times, extra = Times(), []
    raw = RawTransports(SIZE) if BUCKETS[0] == ALL[0] else None
    async with MooncakeMaster(segment_bytes=3 * SIZE) as master:
        for bucket in BUCKETS:
            shared = [SharedMemoryStore(f"bench-{kind}-{os.getpid()}") for kind in ("memory", "files")]
            mooncake = MooncakeStore(master.address, f"b{bucket}")
            lines = [
                Line("shared memory", shared[0], bucket),
                Line("Mooncake", mooncake, bucket),
                Line("files", FileStore(shared[1].folder, durable=False), bucket),
            ]
            first = bucket == ALL[0]
            await rounds(times, lines, mooncake, bucket, source, target, raw if first else None)
            if raw is not None and first:
                raw.end()
                extra.append(await exposed_row(source))
            for line in lines:
                await line.subscriber.close()
            await mooncake.delete([key for line in lines for key in line.keys])
            await mooncake.close()
            for store in shared:
                store.unlink()
    return [*rows(times), *extra]


async def rounds(
    times: Times, lines: list[Line], mooncake: MooncakeStore, bucket: int, source: Bytes, target: Bytes, raw: Any
) -> None:
    descriptor, rng = os.memfd_create("segment"), np.random.default_rng(0)
    os.ftruncate(descriptor, SIZE)
    segment = np.frombuffer(mmap.mmap(descriptor, SIZE), np.uint8)
    os.close(descriptor)
    load = module_load() if bucket == ALL[0] else None
    for version in range(WARM + ROUNDS):
        source[:] = rng.integers(0, 256, SIZE, dtype=np.uint8)
        found = times if version >= WARM else Times()
        if raw is not None:
            raw.round(found.sync, source)
        physical(found, source, target, segment, bucket)
        for line in lines:
            await line.round(found, version, source, load if line is lines[0] else None)
        by_hand(found, mooncake, source, target, bucket)


def rows(times: Times) -> list[Row]:
    found = []
    for bucket in BUCKETS:
        for name, peer in (("publish", "copy in"), ("pull", "copy out")):
            found.append(times.row(f"{name}, shared memory {bucket} MiB", f"{peer} + checksum ({bucket})"))
        for name, peer in (("publish", "put_from"), ("pull", "get_into")):
            found.append(times.row(f"{name}, Mooncake {bucket} MiB", f"{peer}, Mooncake by hand {bucket} MiB"))
        for name in ("publish", "pull"):
            found.append(times.plain(f"{name}, files {bucket} MiB"))
    if ALL[0] in BUCKETS:
        found.append(times.row("commit into a torch module", f"memcpy ({ALL[0]})"))
        others = (f"memcpy ({ALL[0]})", "raw TCP socket", "gloo broadcast", "TransferEngine write")
        found += [times.plain(name) for name in others]
    return found


if __name__ == "__main__":
    write(__file__, asyncio.run(main()), keep="--bucket" in sys.argv)
