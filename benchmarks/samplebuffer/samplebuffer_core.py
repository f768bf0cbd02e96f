"""What one trajectory costs in process: CPU, memory, and how both depend on the number alive and the payload.

A full life is issue, stamp, finish and hand-out, by 64 producers, in groups of 8, at alpha = 1. The peer column holds
the bound to stay under. Times are CPU times of this process; each is the median of interleaved rounds.

python benchmarks/samplebuffer/samplebuffer_core.py [--quick]
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from _results import Row, write

from samplebuffer import Closed, SampleBuffer, Ticket

GROUP, BATCH, PRODUCERS = 8, 64, 64
BOUND_US, BOUND_BYTES = 10.0, 1024


async def _produce(buf: SampleBuffer, payload: Any) -> None:
    try:
        while True:
            ticket = await buf.next_ticket()
            await asyncio.sleep(0)  # a generation
            ticket.stamp(ticket.issued_version)
            ticket.finish(payload, 1.0)
    except Closed:
        return


async def life(trajectories: int, payload: Any = None) -> float:
    """CPU microseconds a trajectory, with the event loop's share."""
    buf = SampleBuffer(count(), batch_groups=BATCH, group_size=GROUP, alpha=1)
    producers = [asyncio.create_task(_produce(buf, payload)) for _ in range(PRODUCERS)]
    delivered = version = 0
    begun = time.process_time()
    while delivered < trajectories:
        delivered += GROUP * len((await buf.get_batch()).groups)
        version += 1
        buf.advance(version)
    spent = time.process_time() - begun
    buf.close()
    await asyncio.gather(*producers)
    assert buf.ledger.balanced
    return spent / delivered * 1e6


def alive(trajectories: int, batches: int) -> tuple[float, float]:
    """CPU microseconds a trajectory with so many alive, without a loop: to fill, and then steady."""
    alpha = trajectories / (BATCH * GROUP) - 1
    buf = SampleBuffer(count(), batch_groups=BATCH, group_size=GROUP, alpha=max(alpha, 0))
    tickets: list[Ticket] = []

    def refill() -> int:
        before = len(tickets)
        while (ticket := buf.next_ticket_nowait()) is not None:
            ticket.stamp(ticket.issued_version)
            tickets.append(ticket)
        return len(tickets) - before

    begun = time.process_time()
    filled = refill()
    finished = 0
    while finished < max(filled // 2, BATCH * GROUP):
        tickets[finished].finish(None, 1.0)
        finished += 1
    fill = (time.process_time() - begun) / filled * 1e6
    gc.collect()
    begun = time.process_time()
    for version in range(1, batches + 1):
        assert buf.get_batch_nowait() is not None
        buf.advance(version)
        refill()
        for ticket in tickets[finished : finished + BATCH * GROUP]:
            ticket.finish(None, 1.0)
        finished += BATCH * GROUP
    steady = (time.process_time() - begun) / (batches * BATCH * GROUP) * 1e6
    assert buf.ledger.balanced
    return fill, steady


def memory(trajectories: int, finished: bool) -> float:
    """Bytes a trajectory alive, running or finished, on top of its payload."""
    alpha = trajectories / (BATCH * GROUP) - 1
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    buf = SampleBuffer(count(), batch_groups=BATCH, group_size=GROUP, alpha=alpha)
    issued = 0
    while (ticket := buf.next_ticket_nowait()) is not None:
        issued += 1
        ticket.stamp(0)
        if finished:
            ticket.finish(None, 1.0)
    del ticket
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / issued


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, n = (3, 20_000) if quick else (7, 100_000)
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    payloads = {"none": None, "4 KB": bytes(4096), "1 MB": bytes(2**20)}
    lives: dict[str, list[float]] = {name: [] for name in payloads}
    fills: dict[int, list[float]] = {size: [] for size in sizes}
    steady: dict[int, list[float]] = {size: [] for size in sizes}
    asyncio.run(life(2_000))
    for turn in range(rounds):
        for name, payload in payloads.items():
            lives[name].append(asyncio.run(life(n, payload)))
        for size in sizes:
            if size < 1_000_000 or turn < (1 if quick else 3):
                filled, running = alive(size, 20 if quick else 100)
                fills[size].append(filled)
                steady[size].append(running)
    rows = [
        Row.against(f"full life, payload {k}", "us CPU", v, "bound", BOUND_US, less=True) for k, v in lives.items()
    ]
    for size in sizes:
        rows.append(Row.against(f"full life, {size:,} alive", "us CPU", steady[size], "bound", BOUND_US, less=True))
    base = median(steady[1_000])
    for size in sizes[1:]:
        rows.append(Row.against(f"full life, {size:,} alive", "us CPU", steady[size], "1,000 alive", base, less=True))
    for name, finished in (("running", False), ("finished", True)):
        used = [memory(10_000 if quick else 100_000, finished) for _ in range(2)]
        rows.append(
            Row.against(f"bookkeeping of a {name} trajectory", "bytes", used, "bound", BOUND_BYTES, less=True)
        )
    write(Path(__file__), rows, quick)


if __name__ == "__main__":
    main()
