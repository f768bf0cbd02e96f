"""Weights that the server itself reads from a folder that both can see."""

from __future__ import annotations

from typing import Any


class PathLoader:
    """A `WeightLoader` for vLLM servers: version N is the checkpoint in the folder that `template` names.

    `template` holds `{version}`. The server needs VLLM_SERVER_DEV_MODE=1. The engine reads the files itself, so there
    is no digest of what it was handed.
    """

    def __init__(self, template: str) -> None:
        if "{version}" not in template:
            raise ValueError(f"{template!r} must hold {{version}}, as in /checkpoints/{{version}}")
        self._template = template

    def engine_args(self) -> dict[str, Any]:
        return {}

    async def start(self, engine: Any) -> None:
        return

    async def prefetch(self, version: int) -> None:
        return

    async def load(self, engine: Any, version: int) -> str:
        folder = self._template.replace("{version}", str(version))
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        return ""

    async def close(self) -> None:
        return
