"""The store's functions against a reference that recomputes everything from the live bindings.

Any sequence of calls, with answers lost and repeated, sessions dying and the server killed between them, keeps:
nothing double-booked, nothing leaked, no waiter overtaken or left waiting beside room for it, tokens rising, stale
tokens refused, events balanced.
"""

import asyncio
import os
import signal
import tempfile
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resmgr import Binding, Node, Pool, Request, wire
from resmgr.amounts import UNIT, to_milli
from resmgr.status import Status, read_status
from resmgr.store import Store

pytestmark = pytest.mark.real

TTL = 10_000
CLASSES = ("H800", "H20")
REQUESTS = st.builds(
    lambda amount, shape, two, priority, minimum: Request(
        "r",
        prefer=["H800"],
        fallback=["H20"] if two else [],
        amount=amount,
        chunk=shape[0] if shape[0] and amount % shape[0] == 0 else None,
        spread=shape[1] and float(amount).is_integer(),
        priority=priority,
        min_amount=min(minimum, amount) if minimum else None,
    ),
    st.sampled_from([0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6]),
    st.sampled_from([(None, False), (None, False), (2, False), (0.5, False), (None, True)]),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([None, None, 1]),
)
NODES = st.lists(st.sampled_from([0.5, 1, 2, 3.5]), min_size=1, max_size=2)


class Room:
    """What is free in one class, computed from the pools and the bindings alone."""

    def __init__(self, pools: dict[str, Pool], bindings: list[Binding], hardware: str) -> None:
        self.units: dict[str, int] = {}
        self.shares: dict[tuple[str, str], int] = {}
        for pool in pools.values():
            for place, milli, _ in pool.places() if pool.hardware == hardware else []:
                self.units[place] = milli // UNIT
                if milli % UNIT:
                    self.shares[place, "tail"] = milli % UNIT
        for part in [a for b in bindings if b.hardware == hardware for a in b.allocations]:
            place, milli = f"{part.pool}/{part.node}", to_milli("x", part.amount)
            if not part.slot:
                self.units[place] -= milli // UNIT
                assert milli % UNIT == 0
            elif (place, part.slot) in self.shares:
                self.shares[place, part.slot] -= milli
            else:
                self.units[place] -= 1
                self.shares[place, part.slot] = UNIT - milli
        assert min([*self.units.values(), *self.shares.values()], default=0) >= 0, "double-booked"

    def free(self, pool: Pool) -> int:
        places = {place for place, _, _ in pool.places()}
        units = sum(n for place, n in self.units.items() if place in places) * UNIT
        return units + sum(milli for (place, _), milli in self.shares.items() if place in places)

    def holds(self, request: Request) -> bool:
        """Whether at least the minimum of a request fits."""
        spec = msgspec.msgpack.decode(wire.spec_of(request), type=wire.Spec)
        fits: dict[str, int] = {}
        for place, units in self.units.items():
            per_unit = UNIT // spec.chunk
            fits[place] = units * UNIT // spec.chunk if spec.chunk >= UNIT else units * per_unit
        for (place, _), left in self.shares.items():
            fits[place] += left // spec.chunk if spec.chunk < UNIT else 0
        chunks = min(spec.count, sum(min(n, 1) if spec.spread else n for n in fits.values()))
        got = chunks * spec.chunk
        if spec.tail and chunks == spec.count:
            left_over = sum(self.units.values()) > spec.count
            got += spec.tail if left_over or any(s >= spec.tail for s in self.shares.values()) else 0
        return got >= spec.least


class StoreMachine(RuleBasedStateMachine):
    server: Any = None  # set by the test
    loop: Any = None

    @initialize(nodes=NODES)
    def begin(self, nodes: list[float]) -> None:
        self.made = 0
        self.store = Store(f"embedded:{self.server.directory}", namespace=uuid.uuid4().hex)
        self.pools: dict[str, Pool] = {}
        self.alive: list[str] = []
        self.doomed: list[str] = []
        self.requests: dict[str, Request] = {}
        self.groups: dict[str, list[str]] = {}
        self.moved: dict[str, str] = {}
        self.known: dict[str, Binding] = {}
        self.queued: list[str] = []
        self.arrived: list[str] = []
        self.token = 0
        self.stale: list[Binding] = []
        self.connect()
        self.register("H800", nodes)
        self.register("H20", nodes)

    def name(self) -> str:
        self.made += 1
        return f"{self.made:04}"

    def call(self, name: str, *args: Any) -> list[Any]:
        return self.loop.run_until_complete(self.store.call(name, *args))

    def status(self) -> Status:
        return read_status(self.call("snapshot"))

    def twice(self, again: bool, name: str, *args: Any) -> list[Any]:
        """The answer; with `again`, that of a repetition because the first was lost."""
        answer = self.call(name, *args)
        return self.call(name, *args) if again else answer

    # --- what happens

    @rule()
    @precondition(lambda self: len(self.alive) < 3)
    def connect(self) -> None:
        session = self.name()
        assert self.call("hello", session, str(TTL))[0] == b"ok"
        self.alive.append(session)

    @rule(hardware=st.sampled_from(CLASSES), nodes=NODES)
    def register(self, hardware: str, nodes: list[float]) -> None:
        pool = Pool(hardware.lower(), hardware=hardware, nodes=[Node(f"n{i}", t) for i, t in enumerate(nodes)])
        definition, places = wire.pool_bytes(pool)
        self.call("register", pool.name, definition, hardware, places, "replace")
        self.pools[pool.name] = pool

    @rule(requests=st.lists(REQUESTS, min_size=2, max_size=4), who=st.randoms(use_true_random=False))
    def crowd(self, requests: list[Request], who: Any) -> None:
        for request in requests:
            self.bind(request, who, wait=True, again=False)
            self.nothing_is_double_booked_or_leaked()

    def bind(self, request: Request, who: Any, wait: bool, again: bool) -> None:
        request.validate()
        key = self.name()
        self.requests[key] = request
        self.arrived.append(key)
        answer = self.twice(
            again, "bind", who.choice(self.alive), key, wire.spec_of(request), str(int(wait)), "", b""
        )
        assert answer[0] in ((b"granted", b"queued", b"infeasible") if wait else (b"granted", b"busy", b"infeasible"))
        empty = [Room(self.pools, [], c).holds(request) for c in [*request.prefer, *request.fallback]]
        assert (answer[0] == b"infeasible") == (not any(empty))

    @rule(request=REQUESTS, who=st.randoms(use_true_random=False), wait=st.booleans(), again=st.booleans())
    def bind_one(self, request: Request, who: Any, wait: bool, again: bool) -> None:
        self.bind(request, who, wait, again)

    @rule(
        requests=st.lists(REQUESTS, min_size=2, max_size=3),
        who=st.randoms(use_true_random=False),
        wait=st.booleans(),
        again=st.booleans(),
    )
    def bind_together(self, requests: list[Request], who: Any, wait: bool, again: bool) -> None:
        key, ids = self.name(), [self.name() for _ in requests]
        first = max(requests, key=lambda request: request.priority)
        for name, request in zip([key, *ids], [first, *requests], strict=True):
            self.requests[name] = msgspec.structs.replace(request, priority=first.priority)
            self.arrived.append(name)
        self.groups[key] = ids
        parts = [x for name, request in zip(ids, requests, strict=True) for x in (name, wire.spec_of(request))]
        answer = self.twice(again, "bind_all", who.choice(self.alive), key, str(int(wait)), *parts)
        assert answer[0] in ((b"granted", b"queued", b"infeasible") if wait else (b"granted", b"busy", b"infeasible"))
        alone = [any(Room(self.pools, [], c).holds(r) for c in [*r.prefer, *r.fallback]) for r in requests]
        assert all(alone) or answer[0] == b"infeasible"
        there = {b.id for b in self.status().bindings} & set(ids)
        assert there == (set(ids) if answer[0] == b"granted" else set()), "half a gang"

    @rule(who=st.randoms(use_true_random=False), again=st.booleans())
    @precondition(lambda self: self.known)
    def release(self, who: Any, again: bool) -> None:
        binding = who.choice(list(self.known.values()))
        assert self.call("release", binding.id, str(binding.token), "0")[0] == b"ok"
        if again:
            assert self.call("release", binding.id, str(binding.token), "1")[0] == b"ok"

    @rule(who=st.randoms(use_true_random=False))
    @precondition(lambda self: self.stale)
    def use_a_stale_token(self, who: Any) -> None:
        binding = who.choice(self.stale)
        for name, rest in (("release", ("0",)), ("annotate", (b"",))):
            assert self.call(name, binding.id, str(binding.token), *rest)[0] == b"stale"

    @rule(who=st.randoms(use_true_random=False), keep=st.booleans(), again=st.booleans())
    @precondition(lambda self: self.queued)
    def withdraw(self, who: Any, keep: bool, again: bool) -> None:
        key = who.choice(self.queued[:2])
        targets = self.groups.get(key, [key.removesuffix("+")])
        self.twice(again, "withdraw", key, wire.encode(targets), "1" if key.endswith("+") else str(int(keep)))

    @rule(who=st.randoms(use_true_random=False), amount=st.sampled_from([0.5, 1, 1.5, 2, 5]), again=st.booleans())
    @precondition(lambda self: any(b.owner in self.alive for b in self.known.values()))
    def reconfigure(self, who: Any, amount: float, again: bool) -> None:
        binding = who.choice([b for b in self.known.values() if b.owner in self.alive])
        old = self.requests[binding.id]
        waits = binding.id + "+" in self.queued
        if waits or old.chunk is not None or old.spread or amount == binding.amount:
            return
        now, then = to_milli("x", binding.amount), to_milli("x", amount)
        grow = msgspec.structs.replace(old, prefer=[binding.hardware], fallback=[], min_amount=None, amount=amount)
        spec, whole = wire.spec_of(grow, max(then - now, 1)), wire.spec_of(grow, then)
        grown = msgspec.structs.replace(grow, amount=max(then - now, 1) / UNIT)
        self.requests[binding.id + "+"] = grown
        self.arrived = [key for key in self.arrived if key != binding.id + "+"] + [binding.id + "+"]
        args = (binding.owner, binding.id, str(binding.token), now, then, spec, whole, "1")
        assert self.twice(again, "reconfigure", *args)[0] in (b"granted", b"queued", b"infeasible")

    @rule(who=st.randoms(use_true_random=False))
    @precondition(lambda self: self.known)
    def hold(self, who: Any) -> None:
        binding = who.choice(list(self.known.values()))
        assert self.call("hold", who.choice(self.alive), binding.id, str(binding.token))[0] == b"granted"

    @rule(who=st.randoms(use_true_random=False), again=st.booleans())
    @precondition(lambda self: any(b.fell_back for b in self.known.values()))
    def move_back(self, who: Any, again: bool) -> None:
        binding = who.choice([b for b in self.known.values() if b.fell_back])
        new = self.name()
        self.requests[new] = self.requests[binding.id]
        request = msgspec.structs.replace(self.requests[new], min_amount=None)
        room = Room(self.pools, list(self.known.values()), "H800")
        is_free = not any("H800" in w.classes for w in self.status().waiting)
        answer = self.twice(again, "move_back", who.choice(self.alive), binding.id, str(binding.token), new)
        assert answer[0] in (b"granted", b"busy")
        if self.moved.get(binding.id) in self.known:
            assert answer[0] == b"busy", "moved twice"
        elif binding.owner in self.alive and binding.amount == request.amount and not request.spread:
            assert (answer[0] == b"granted") == (is_free and room.holds(request)), "a move that nobody offers again"
        if answer[0] == b"granted":
            self.moved[binding.id] = new

    @rule(who=st.randoms(use_true_random=False))
    @precondition(lambda self: len(self.alive) > 1)
    def die(self, who: Any) -> None:
        session = who.choice(self.alive)
        self.alive.remove(session)
        self.doomed.append(session)

    @rule(share=st.sampled_from([0.2, 0.6, 1.1]))
    def beat(self, share: float) -> None:
        """Time passes; the living beat in time, unless all of it passed at once."""
        prefix = self.store._prefix
        self.loop.run_until_complete(self.store._redis.hincrby(prefix + "meta", "clock", int(share * TTL)))
        survivors = []
        for session in self.alive:
            answer = self.call("beat", session, TTL, "0-0", "0")
            survivors += [session] if answer[0] == b"ok" else []
        self.doomed += [session for session in self.alive if session not in survivors]
        self.alive = survivors
        if not self.alive:
            self.connect()

    @rule(session=st.randoms(use_true_random=False))
    @precondition(lambda self: len(self.alive) > 1)
    def close(self, session: Any) -> None:
        leaving = session.choice(self.alive)
        self.alive.remove(leaving)
        self.doomed.append(leaving)
        assert self.call("bye", leaving, b"\x90")[0] == b"ok"

    @rule(chance=st.integers(0, 9))
    def server_is_killed(self, chance: int) -> None:
        if chance == 0 and self.server.pid:
            os.kill(self.server.pid, signal.SIGKILL)
            self.loop.run_until_complete(self.server.ensure())

    # --- what must hold

    @invariant()
    def nothing_is_double_booked_or_leaked(self) -> None:
        if not hasattr(self, "store"):
            return
        status = self.status()
        rooms = {c: Room(self.pools, list(status.bindings), c) for c in CLASSES}
        for pool in status.pools:
            assert to_milli("x", pool.free + 1) - UNIT == rooms[pool.hardware].free(self.pools[pool.name])
        self.grants_are_in_order(status)
        self.nobody_waits_beside_room(status, rooms)
        self.everybody_stands_where_they_could_be_served(status)
        for session in self.doomed:
            if session not in status.leases:
                assert all(b.holder != session for b in status.bindings)

    def grants_are_in_order(self, status: Status) -> None:
        still = {w.id: w for w in status.waiting}
        live = {b.id: b for b in status.bindings}
        for key, binding in live.items():
            if key not in self.known or self.known[key].token != binding.token:
                assert binding.token > self.token, "tokens must rise"
                ahead = [w for w in still.values() if binding.hardware in w.classes and self.before(w.id, key)]
                assert not ahead, "overtaken"
        self.stale += [b for key, b in self.known.items() if key not in live or live[key].token != b.token]
        self.token = max([self.token, *(b.token for b in live.values())])
        self.known = live
        self.queued = sorted(still)

    def before(self, first: str, second: str) -> bool:
        def rank(key: str) -> tuple[int, int]:
            place = self.arrived.index(key) if key in self.arrived else len(self.arrived)
            return -self.requests[key].priority, place

        return rank(first) < rank(second)

    def nobody_waits_beside_room(self, status: Status, rooms: dict[str, Room]) -> None:
        for hardware in CLASSES:
            queue = sorted(
                (w.id for w in status.waiting if hardware in w.classes),
                key=lambda key: (-self.requests[key].priority, self.arrived.index(key)),
            )
            if queue and not self.requests[queue[0]].spread and queue[0] not in self.groups:
                assert not rooms[hardware].holds(self.requests[queue[0]]), "waits beside room"

    def everybody_stands_where_they_could_be_served(self, status: Status) -> None:
        empty = {hardware: Room(self.pools, [], hardware) for hardware in CLASSES}
        for waiter in status.waiting:
            for request in [self.requests[key] for key in self.groups.get(waiter.id, [waiter.id])]:
                could = {c for c in [*request.prefer, *request.fallback] if empty[c].holds(request)}
                assert could <= set(waiter.classes), "stands in too few queues"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for session in self.alive + self.doomed:
                self.call("bye", session, b"\x90")
            status = self.status()
            assert status.bindings == () and status.waiting == ()
            assert all(pool.free == pool.total for pool in status.pools)
            self.loop.run_until_complete(self.store.close())


def test_the_functions_match_the_reference():
    from hypothesis.stateful import run_state_machine_as_test

    from resmgr.embedded import EmbeddedServer

    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        server = EmbeddedServer(Path(directory))
        runner.run(server.ensure())
        StoreMachine.server, StoreMachine.loop = server, runner.get_loop()
        try:
            run_state_machine_as_test(
                StoreMachine,
                settings=settings(
                    max_examples=25,
                    stateful_step_count=40,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(server.stop())
