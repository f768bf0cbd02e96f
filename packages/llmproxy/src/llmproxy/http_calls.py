"""Control requests to a server, and how its refusals are told (tests/llmproxy/test_llmproxy_http_worker.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from .dialects import Control
from .errors import InvalidRequest, WorkerLost
from .upstream import Pool, call


async def ask(worker: str, pool: Pool, control: Control, headers: bytes) -> Any:
    """Send a control request; the decoded answer. Raises WorkerLost, or InvalidRequest for a 4xx."""
    method = "GET" if control.body is None else "POST"
    body = b"" if control.body is None else msgspec.json.encode(control.body)
    try:
        answer = await call(pool, method, control.path, body, headers)
    except WorkerLost as error:
        raise WorkerLost(worker, error.reason) from error
    if 400 <= answer.status < 500:
        raise callers_error(answer.status, answer.body)
    if answer.status != 200:
        text = answer.body[:300].decode(errors="replace")
        raise WorkerLost(worker, f"{control.path} answered {answer.status}: {text}")
    return _decoded(answer.body)


@asynccontextmanager
async def in_time(worker: str, seconds: float) -> AsyncIterator[None]:
    """A server that takes what is asked and does not answer is lost."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise WorkerLost(worker, f"gave no answer in {seconds:g} s") from None


def callers_error(status: int, body: bytes) -> InvalidRequest:
    """A server's 4xx as the caller's error, naming the field where the server did."""
    told = _decoded(body)
    error = told.get("error", told) if isinstance(told, dict) else {}
    known = error if isinstance(error, dict) else {}
    text = known.get("message") or body[:300].decode(errors="replace")
    return InvalidRequest(str(known.get("param") or "request"), f"was answered {status}: {text}", "what it takes")


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body) if body else {}
    except msgspec.DecodeError:
        return {}
