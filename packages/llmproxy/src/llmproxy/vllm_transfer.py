"""How vLLM engines hand caches to each other: NIXL, where the decode engine pulls from the prefill engine.

A prefill engine keeps the cache of an answered request until a decode engine took it, said that it will not, or a
lease ran out, which a decode engine that has the request extends. So nothing stays for ever, whoever dies
(tests/llmproxy/test_llmproxy_pairs.py).
"""

from __future__ import annotations

import socket
from typing import Any

from .worker import Role

LEASE_S = 10
"""Seconds a cache waits for a decode engine. A proxy needs milliseconds; a pause waits for it at worst."""

ASK: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a prefill request asks of its engine: keep the cache, and say where it is."""


def engine_args(role: Role) -> dict[str, Any]:
    """Engine arguments that a role needs; a cache that cannot be had is computed again rather than failed."""
    if role == "both":
        return {}
    return {
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
    }


def environment(role: Role) -> dict[str, str]:
    """Each engine listens on a port of its own for others to ask where its memory is."""
    if role == "both":
        return {}
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(probe.getsockname()[1])}
