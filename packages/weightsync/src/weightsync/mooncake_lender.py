"""`python -m weightsync.mooncake_lender HOST:PORT BYTES`: lends memory to a Mooncake store until it is ended.

Run it where it outlives publishers: what lies in the memory is lost with it.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from weightsync.mooncake import MooncakeStore

__all__: list[str] = []


def main() -> None:
    # The signals wake sigwait below instead of a handler, so that none is lost between the two.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    store = MooncakeStore(sys.argv[1], segment_bytes=int(sys.argv[2]))
    print("ready", flush=True)
    signal.sigwait(ends)
    asyncio.run(store.close())


if __name__ == "__main__":
    main()
