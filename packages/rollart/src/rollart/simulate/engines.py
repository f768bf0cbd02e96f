"""Generation engines: llmproxy's simulated worker with a model's roofline, weights that travel over links, and tokens
that are counted, not stored.

Invariant: an engine is busy exactly while it has generations (tests/rollart/test_rollart_simulate_engines.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf

from llmproxy import GenerateRequest, GenerateResult, Partial
from llmproxy.sim import Roofline, SimWorker
from llmproxy.sim.job import Job
from llmproxy.sim.speed import Pace
from llmproxy.values import Handoff, Span, extend_partial
from llmproxy.worker import Role
from rollart.simulate.blank import Blank
from rollart.simulate.host import Host
from rollart.simulate.links import Link


def _nothing() -> None:
    pass


class Busy:
    """Seconds during which something was going on; `began` and `ended` are called whenever that changes."""

    def __init__(self, began: Callable[[], None] = _nothing, ended: Callable[[], None] = _nothing) -> None:
        self._began = began
        self._ended = ended
        self._count = 0
        self._since = 0.0
        self._total = 0.0

    def enter(self) -> None:
        self._count += 1
        if self._count == 1:
            self._since = asyncio.get_running_loop().time()
            self._began()

    def leave(self) -> None:
        self._count -= 1
        if not self._count:
            self._total += asyncio.get_running_loop().time() - self._since
            self._ended()

    def seconds(self) -> float:
        """So far."""
        running = asyncio.get_running_loop().time() - self._since if self._count else 0.0
        return self._total + running


class Node:
    """A host of several devices: it has one link to the weight store, and takes each version once."""

    def __init__(self, number: int, link: Link, nbytes: float) -> None:
        self.number = number
        self.link = link
        self._nbytes = nbytes
        self._pulls: dict[int, asyncio.Task[None]] = {}

    async def pull(self, version: int) -> None:
        """Return when the version lies in the host's memory; engines of one node share the transfer."""
        task = self._pulls.get(version)
        if task is None:
            self._pulls = {version: asyncio.create_task(self.link.carry(self._nbytes))}
            task = self._pulls[version]
        await asyncio.shield(task)


class Shared:
    """The speed of an engine on a machine whose cores others take too."""

    def __init__(self, speed: Roofline, host: Host) -> None:
        self._host = host
        self.capacity, self.batch, self.together = speed.capacity, speed.batch, speed.together
        self.transfer = speed.transfer
        self._speed = speed

    def pace(self, decoding: int, prefilling: float, depth: float) -> Pace:
        pace = self._speed.pace(decoding, prefilling, depth)
        slowdown = self._host.slowdown
        return Pace(slowdown * pace.base, slowdown * pace.slope, pace.chunk)


class Generator(SimWorker):
    """One engine: `gpus` devices of a node."""

    def __init__(
        self,
        id: str,
        *,
        speed: Roofline,
        gpus: int,
        node: Node,
        pulls: bool,
        probed: bool,
        caches: bool,
        role: Role,
        context_limit: int,
        update_s: float,
        host: Host | None = None,
    ) -> None:
        """`pulls` says that versions come through the node's link; else they are broadcast in an update.
        Without `probed`, requests that are no trajectory's turn are answered at once; without `caches`, each turn
        computes its whole context. `host` is the machine that it shares with the rest."""
        super().__init__(
            id,
            hardware=speed.device.name,
            role=role,
            context_limit=context_limit,
            cache_tokens=inf if caches else 0,
            update_time=update_s,
            length=_length,
            speed=Shared(speed, host) if host else speed,
        )
        self.gpus = gpus
        self.generations = 0
        self.node = node
        self._pulls = pulls
        self._probed = probed
        self._host = host
        self.busy = Busy()
        if host is not None:
            self.busy = Busy(partial(host.enter, "engines"), partial(host.leave, "engines"))
            host.tell(self.repace)

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        if not self._probed and not isinstance(request.prompt_ids, Blank):
            return self._at_once(request)
        self.generations += 1
        self.busy.enter()
        try:
            result = await super().generate(request)
        finally:
            self.busy.leave()
        if self._host is not None:
            await self._host.turn()
        return result

    async def prefill(self, request: GenerateRequest) -> Handoff:
        self.busy.enter()
        try:
            handoff = await super().prefill(request)
            assert handoff is not None
            return handoff
        finally:
            self.busy.leave()

    def _at_once(self, request: GenerateRequest) -> GenerateResult:
        version, made = self.version, request.budget
        assert version is not None
        logprobs = [-float(position) for position in range(made)]
        return GenerateResult([version] * made, logprobs, [Span(version, 0, made)], "length", self.id)

    async def prefetch(self, version: int) -> None:
        await super().prefetch(version)  # raises for a dead one
        if self._pulls:
            await self.node.pull(version)

    def _partial(self, job: Job) -> Partial:
        if not isinstance(job.request.prompt_ids, Blank):  # the parity probe's
            return super()._partial(job)
        made = Blank(job.made)
        return extend_partial(job.request, made, made, job.spans)


def _length(request: GenerateRequest) -> int:
    """What the environment said the reply takes, less what an interrupted attempt has made of it."""
    prompt = request.prompt_ids
    reply = prompt.reply if isinstance(prompt, Blank) else request.max_tokens
    return reply - (len(request.resume.token_ids) if request.resume else 0)
