"""Starts Ray's own processes (gcs, raylet and its agents) in FOLDER and ends, leaving them to the keeper.

Usage: head.py FOLDER CPUS OBJECT_STORE_BYTES; writes the cluster's address to FOLDER/address.

`ray start` cannot leave out the dashboard's server, the autoscaler's monitor and Ray Client's server. Nobody uses
them here, and they cost 300 MB and several seconds of every start; so Ray's `Node` is made directly.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams

START_SECONDS = 150.0


def patiently(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """`get_node` that waits for a raylet on a busy machine; Ray's own 30 seconds are too few there."""

    def wait(*args: Any) -> Any:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return get_node(*args)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    return wait


def main() -> None:
    folder, cpus, object_store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    services.start_api_server = lambda *args, **kwargs: ("", None)
    services.get_node = patiently(services.get_node)
    params = RayParams(
        temp_dir=folder,
        num_cpus=cpus,
        object_store_memory=object_store,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        gcs_server_port=0,
    )
    node = Node(params, head=True, shutdown_at_exit=False, spawn_reaper=False)
    (Path(folder) / "address").write_text(node.gcs_address)


if __name__ == "__main__":
    main()
