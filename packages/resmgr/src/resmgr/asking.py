"""The calls by which bindings are asked for; each may be made again under the same ids."""

import math
import uuid
from collections.abc import Sequence

import msgspec

from resmgr import wire
from resmgr.amounts import to_milli
from resmgr.store import Store
from resmgr.values import Binding, Request
from resmgr.waiting import GROWS, Want


def wants_one(store: Store, request: Request, timeout: float | None) -> Want:
    return _wants(store, uuid.uuid4().hex, request, timeout, None)


def wants_again(store: Store, lost: Binding, request: Request) -> Want:
    """What was lost, under its old id, ahead of newcomers, on what is left of its old places."""
    return _wants(store, lost.id, request, None, lost)


def _wants(store: Store, key: str, request: Request, timeout: float | None, lost: Binding | None) -> Want:
    spec, wait = wire.spec_of(request), "0" if timeout == 0 else "1"
    last = (lost.hardware, wire.whole_places(lost)) if lost else ("", b"")
    patience = math.inf if lost else None
    return Want(
        key,
        [key],
        [request],
        lambda session: store.call("bind", session, key, spec, wait, *last, patience=patience),
        timeout,
    )


def wants_all(store: Store, requests: Sequence[Request], timeout: float | None) -> Want:
    """Several bindings in one step, or none."""
    key, ids = uuid.uuid4().hex, [uuid.uuid4().hex for _ in requests]
    parts = [part for own, request in zip(ids, requests, strict=True) for part in (own, wire.spec_of(request))]
    wait = "0" if timeout == 0 else "1"
    return Want(key, ids, requests, lambda session: store.call("bind_all", session, key, wait, *parts), timeout)


def wants_amount(store: Store, binding: Binding, request: Request, timeout: float | None, leave: str) -> Want:
    """Another amount of a binding; it may grow on its own class only."""
    now, then = to_milli("amount", binding.amount), to_milli("Request.amount", request.amount)
    same = msgspec.structs.replace(request, prefer=[binding.hardware], fallback=[])
    gain, whole, wait = wire.spec_of(same, max(then - now, 1)), wire.spec_of(same, then), "0" if timeout == 0 else "1"
    args = (binding.id, str(binding.token), now, then, gain, whole, wait, leave)
    key = binding.id + GROWS
    return Want(key, [binding.id], [request], lambda session: store.call("reconfigure", session, *args), timeout)
