"""Engines are busy while they generate; a node takes each version once, whatever engines it has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llmproxy import GenerateRequest, Partial
from llmproxy.sim import Roofline
from rollart.simulate.blank import Blank
from rollart.simulate.catalog import builtin
from rollart.simulate.clock import VirtualLoop
from rollart.simulate.config import make_simulation
from rollart.simulate.engines import Generator, Node
from rollart.simulate.host import Host
from rollart.simulate.links import Link


def virtual(work):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def engine(name: str, node: Node, *, probed: bool = True, caches: bool = True, host: Host | None = None) -> Generator:
    speed = Roofline(builtin().device("H800").device("H800"), builtin().shape("qwen3-8b"))
    return Generator(
        name,
        speed=speed,
        gpus=1,
        node=node,
        pulls=True,
        probed=probed,
        caches=caches,
        role="both",
        context_limit=32_768,
        update_s=2.0,
        host=host,
    )


def test_tokens_are_counted_and_the_time_is_busy() -> None:
    async def run() -> None:
        subject = engine("gen-0", Node(0, Link(), 1.0))
        result = await subject.generate(GenerateRequest("t", Blank(1000, 50), 100, request_id="r"))
        now = asyncio.get_running_loop().time()
        assert (len(result.token_ids), len(result.logprobs), result.spans[-1].end) == (50, 50, 50)
        await asyncio.sleep(10.0)
        assert subject.busy.seconds() == pytest.approx(now)

    virtual(run())


@pytest.mark.parametrize("caches", [True, False])
def test_a_later_turn_computes_what_is_new_or_without_a_prefix_cache_all(caches: bool) -> None:
    async def run() -> list[int]:
        subject = engine("gen-0", Node(0, Link(), 1.0), caches=caches)
        found = []
        for number, tokens in enumerate((1000, 2000, 3000)):
            result = await subject.generate(GenerateRequest("t", Blank(tokens, 50), 100, request_id=str(number)))
            assert not isinstance(result, Partial)
            found.append(result.timing.cached_tokens)
        return found

    assert virtual(run()) == ([0, 1050, 2050] if caches else [0, 0, 0])


@pytest.mark.parametrize(("profiles", "kept"), [(["tiny-lake"], False), (["tiny-lake", "webshop"], True)])
def test_no_context_is_kept_where_every_turn_begins_a_new_one(profiles: list[str], kept: bool) -> None:
    tasks = {f"task-{n}": {"kind": "env", "env": "module:Env", "max_tokens": 8} for n in range(len(profiles))}
    world: dict[str, Any] = {"model": "qwen3-8b", "generation": [{"hardware": "H800", "gpus": 8}]}
    world["tasks"] = dict(zip(tasks, profiles, strict=True))
    assert make_simulation({"tasks": tasks, "simulate": world}).caches is kept


def test_an_interrupted_generation_makes_what_is_left_of_its_reply() -> None:
    async def run() -> int:
        subject = engine("gen-0", Node(0, Link(), 1.0))
        request = GenerateRequest("t", Blank(1000, 50), 100, request_id="r")
        going = asyncio.create_task(subject.generate(request))
        await asyncio.sleep(0.3)
        await subject.interrupt("r")
        partial = await going
        assert isinstance(partial, Partial)
        assert 0 < len(partial.token_ids) < 50
        rest = GenerateRequest("t", Blank(1000, 50), 100, request_id="s", resume=partial)
        return len((await subject.generate(rest)).token_ids)

    assert virtual(run()) == 50


def test_an_engine_is_slower_for_as_long_as_others_take_its_core() -> None:
    async def run(other_s: float) -> float:
        host = Host(1, 0.0)
        subject = engine("gen-0", Node(0, Link(), 1.0), host=host)
        going = asyncio.create_task(subject.generate(GenerateRequest("t", Blank(1000, 500), 500, request_id="r")))
        await asyncio.sleep(1.0)
        await host.compute("trainer", other_s)
        await going
        return asyncio.get_running_loop().time()

    assert virtual(run(1.0)) == pytest.approx(virtual(run(0.0)) + 1.0, abs=1e-3)


def test_engines_of_a_node_share_the_pull() -> None:
    async def run() -> float:
        node = Node(0, Link(stream=10.0), 100.0)
        engines = [engine(f"gen-{number}", node) for number in range(8)]
        await asyncio.gather(*(one.prefetch(1) for one in engines))
        return asyncio.get_running_loop().time()

    assert virtual(run()) == pytest.approx(10.0)


def test_a_probe_takes_its_turn_or_no_time() -> None:
    async def run() -> list[float]:
        ends = []
        for probed in (True, False):
            subject = engine("gen-0", Node(0, Link(), 1.0), probed=probed)
            start = asyncio.get_running_loop().time()
            result = await subject.generate(GenerateRequest("p", [0] * 16, 8, request_id="p"))
            assert result.logprobs == [-float(position) for position in range(8)]
            ends.append(asyncio.get_running_loop().time() - start)
        return ends

    took, none = virtual(run())
    assert took > 0.05
    assert none == 0.0
