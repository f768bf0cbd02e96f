"""A vLLM server on this host as an engine for `VLLMWeightLoader`, over its HTTP endpoints.

Start the server with `SERVER_ARGUMENTS` and with VLLM_SERVER_DEV_MODE=1. It maps the staging memory of this process,
so it must run on the same host, as the same user, and see the same process numbers.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

from weightsync.blocking import in_thread
from weightsync.errors import EngineRefused

__all__ = ["SERVER_ARGUMENTS", "HTTPEngine"]

# The server is on this host: a proxy that the environment names is not for it.
_DIRECT = build_opener(ProxyHandler({}))

SERVER_ARGUMENTS = (
    "--worker-extension-cls=weightsync.vllm_engine.Extension",
    '--weight-transfer-config={"backend": "weightsync"}',
)


class HTTPEngine:
    """What the loader needs of an engine, and a pause around it."""

    def __init__(self, url: str, *, timeout: float = 600.0) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answer = await in_thread(self._post, "/collective_rpc", {"method": method, "args": args})
        results: list[Any] = answer["results"]
        return results

    async def update_weight_version(self, version: str) -> None:
        await in_thread(self._post, "/update_weight_version", {"new_version": version})

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Running requests wait inside, and go on with their caches rebuilt; if the body fails, they stay waiting."""
        await in_thread(self._post, "/pause?" + urlencode({"mode": "keep", "clear_cache": "true"}), {})
        yield
        await in_thread(self._post, "/resume", {})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = Request(self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with _DIRECT.open(request, timeout=self._timeout) as response:
                return json.load(response)
        except HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise EngineRefused(f"{self._url}{path} answered {error.code}: {text}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise EngineRefused(f"{self._url}{path} does not answer: {error!r}") from error
