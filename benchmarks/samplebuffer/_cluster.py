"""Starts a local Ray for a runner. On a busy machine a node may need longer than the 30 s that Ray gives it."""

from __future__ import annotations

import logging

import ray


def start() -> None:
    """Try until it starts, five times at most."""
    for attempts_left in (4, 3, 2, 1, 0):
        try:
            ray.init(
                address="local",
                num_cpus=8,
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                object_store_memory=2**30,
            )
            return
        except Exception:
            ray.shutdown()
            if not attempts_left:
                raise
