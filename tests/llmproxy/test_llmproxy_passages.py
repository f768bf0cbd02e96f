"""Requests whose bytes another carries: placed by gate, fence and router, charged once, released once."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy import AffinityRouter, GenerateRequest, LLMProxy, NoWorker, ProxyConfig, SimWorker
from llmproxy.fleet import Slot


class Load:
    """A carrier that remembers what it was told."""

    def __init__(self, proxy: LLMProxy, name: str = "t", tokens: int = 10) -> None:
        self.request = GenerateRequest(name, [], tokens)
        self.avoid: Slot | None = None
        self.told: list[str] = []
        self.error = ""
        self.slot: Slot | None = None
        self._proxy = proxy

    def placed(self, slot: Slot, version: int) -> None:
        self.slot = slot
        self.told.append(f"{slot.id}@{version}")

    def moved(self, slot: Slot, reason: str) -> None:
        self.slot = None
        self.told.append(f"moved from {slot.id}")
        self._proxy.passages.enter(self)

    def refused(self, error: NoWorker) -> None:
        self.told.append("refused")
        self.error = str(error)


def running(proxy: LLMProxy) -> int:
    return sum(slot.running for slot in proxy.workers())


async def test_enter_and_leave() -> None:
    proxy = LLMProxy([SimWorker("a")])
    load = Load(proxy)
    proxy.passages.enter(load)
    assert load.told == ["a@0"] and running(proxy) == 1 and len(proxy.passages) == 1
    proxy.passages.leave(load, served=True)
    proxy.passages.leave(load, served=True)  # once is enough, twice does no harm
    assert running(proxy) == 0 and len(proxy.passages) == 0 and proxy.stats().router["homes"] == 1
    await proxy.close()


@pytest.mark.seconds
async def test_the_barrier() -> None:
    proxy = LLMProxy([SimWorker("a")], config=ProxyConfig(patience=0.05))
    await proxy.suspend()
    load = Load(proxy)
    proxy.passages.enter(load)
    await asyncio.sleep(0.15)  # suspended, nobody's patience runs out
    assert load.told == [] and proxy.passages.waiting == 1
    await proxy.update(1)
    await proxy.resume()
    assert load.told == ["a@1"]
    proxy.passages.leave(load, served=False)
    await proxy.close()


@pytest.mark.seconds
async def test_patience_begins_when_the_gate_opens() -> None:
    dead = SimWorker("a")
    proxy = LLMProxy([dead], config=ProxyConfig(patience=0.5))
    await proxy.suspend()
    dead.die()
    proxy.lose(proxy.workers()[0], "is dead")
    load = Load(proxy)
    proxy.passages.enter(load)
    await asyncio.sleep(0.4)
    await proxy.resume()
    await asyncio.sleep(0.3)
    assert load.told == []
    await asyncio.sleep(0.5)
    assert load.told == ["refused"]
    await proxy.close()


async def test_patience() -> None:
    proxy = LLMProxy([], config=ProxyConfig(patience=0.02))
    first, second = Load(proxy, "first"), Load(proxy, "second")
    proxy.passages.enter(first)
    proxy.passages.enter(second)
    proxy.passages.leave(second, served=False)
    await asyncio.sleep(0.1)
    assert first.told == ["refused"] and second.told == [] and len(proxy.passages) == 0
    await proxy.close()


async def test_a_refusal_names_who_is_fenced_and_why() -> None:
    proxy = LLMProxy([SimWorker("a", version=5)], version=0, config=ProxyConfig(patience=0.02))
    load = Load(proxy)
    proxy.passages.enter(load)
    await asyncio.sleep(0.1)
    assert "1 known, fenced are a: " in load.error and "5" in load.error
    await proxy.close()


async def test_what_a_worker_carries_that_is_removed_while_paused_moves() -> None:
    """Nobody would ever have it go on there."""
    proxy = LLMProxy([SimWorker("a")])
    load = Load(proxy)
    proxy.passages.enter(load)
    proxy.add_worker(SimWorker("b"))
    await proxy.suspend()
    proxy.remove_worker("a")
    assert load.told == ["a@0", "moved from a"] and running(proxy) == 0
    await proxy.resume()
    assert load.told[-1] == "b@0" and running(proxy) == 1
    proxy.passages.leave(load, served=False)
    await proxy.close()


async def test_a_fenced_workers_load_moves_and_a_lost_worker_is_fenced() -> None:
    proxy = LLMProxy([SimWorker("a"), SimWorker("b")], router=AffinityRouter(random=Random(0)))
    loads = [Load(proxy, f"t{n}") for n in range(8)]
    for load in loads:
        proxy.passages.enter(load)
    victim = next(load for load in loads if load.slot and load.slot.id == "a")
    proxy.passages.fail(victim, "is dead")
    assert all(load.slot and load.slot.id == "b" for load in loads if load is not victim)
    assert victim.told == ["a@0"] and running(proxy) == 7  # it left; where it goes is for itself to say
    assert proxy.stats().workers[0].fenced == "is dead"
    for load in loads:
        proxy.passages.leave(load, served=False)
    assert running(proxy) == 0
    await proxy.close()


@pytest.mark.parametrize("hardware", ["any", "H20"])
async def test_a_worker_to_avoid_is_taken_only_when_it_is_the_only_one(hardware: str) -> None:
    """Also where the policy would rather have it: here it is of the class that is asked for."""
    router = AffinityRouter({"default": "any"}, random=Random(0))
    proxy = LLMProxy([SimWorker("a", hardware="any"), SimWorker("b", hardware=hardware)], router=router)
    for n in range(500):
        load = Load(proxy, f"t{n}")
        load.avoid = proxy.workers()[0]
        proxy.passages.enter(load)
        assert load.told == ["b@0"]
    proxy.remove_worker("b")
    load.avoid = proxy.workers()[0]
    proxy.passages.leave(load, served=False)
    proxy.passages.enter(load)
    assert load.told[-1] == "a@0"
    await proxy.close()


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "fence", "suspend", "resume", "remove"]), st.integers(0, 5))
    )
)
def test_whatever_happens_charges_are_those_of_what_is_carried(moves: list[tuple[str, int]]) -> None:
    async def run() -> None:
        proxy = LLMProxy(
            [SimWorker(f"w{n}") for n in range(3)], config=ProxyConfig(probe_first=1e-6, probe_every=1e-6)
        )
        loads = [Load(proxy, f"t{n}", 10 + n) for n in range(6)]
        inside: set[int] = set()
        for move, n in moves:
            match move:
                case "enter" if n not in inside:
                    inside.add(n)
                    proxy.passages.enter(loads[n])
                case "leave":
                    inside.discard(n)
                    proxy.passages.leave(loads[n], served=True)
                    loads[n].slot = None
                case "fence" if n < len(proxy.workers()):
                    proxy.lose(proxy.workers()[n], "for a test")
                case "suspend":
                    await proxy.suspend()
                case "resume":
                    await proxy.resume()
                case "remove" if n == 0 and len(proxy.workers()) > 1:
                    proxy.remove_worker(proxy.workers()[0].id)
            placed = [load for load in loads if load.slot is not None]
            for slot in {load.slot for load in placed} | set(proxy.workers()):
                assert slot is not None
                assert slot.running == sum(load.slot is slot for load in placed)
            assert len(proxy.passages) == len(inside)
        for load in loads:
            proxy.passages.leave(load, served=False)
        assert running(proxy) == 0
        await proxy.close()

    asyncio.run(run())
