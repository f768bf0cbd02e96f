"""The first phase where prefill and decode are apart: who computes a context, who is told when nobody comes for it.

A request has its decode worker before it is prefilled, so that nothing lies between the end of the first phase and
the start of the second. Invariants (tests/llmproxy/test_llmproxy_phases.py, and both machines): no cache made by old
weights is used, none stays behind, and the loss of either worker costs only time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import cast

from msgspec import Struct

from .config import ProxyConfig
from .fleet import ANY, Fleet, Slot
from .routing import Router
from .values import GenerateRequest, GenerateResult, Handoff
from .worker import DecodeWorker, PrefillWorker

_log = logging.getLogger(__name__)


_REMEMBER = 65_536


class Held(Struct, frozen=True):
    """A trajectory's context as its last turn left it: the decode worker that has all of it, how many tokens, and
    whether the prefill worker had lost what it knew of them.
    """

    worker: str
    tokens: int
    lost: bool


class Prefills:
    """The prefill workers and the policy that chooses among them. `unsplit` counts requests that found none.

    A turn is prefilled where its prefix is. A prefill worker keeps the prefixes of as many trajectories as fit; once
    it had to compute most of a context again, the next turn is left to the decode worker, which holds all of it, as
    long as what is new is short. `local` counts such turns.
    """

    def __init__(self, fleet: Fleet, router: Router, config: ProxyConfig) -> None:
        self.unsplit = 0
        self.local = 0
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._fleet = fleet
        self._router = router
        self._config = config

    def choose(self, request: GenerateRequest, target: Slot) -> Slot | None:
        """Who prefills for `target`; nobody when that does it itself."""
        if target.role != "decode":
            return None
        if self._computes_itself(request, target):
            self.local += 1
            return None
        slot = self._router.choose(request, self._fleet)
        self.unsplit += slot is None
        return slot

    def served(self, request: GenerateRequest, slot: Slot, answer: GenerateResult) -> None:
        """A turn ended on a decode worker, which now holds its context."""
        if slot.role != "decode":
            return
        tokens = len(request.prompt_ids) + len(answer.token_ids)
        before = self._held.pop(request.trajectory_id, None)
        found = before is not None and 2 * answer.timing.cached_tokens >= before.tokens
        # Who computed the context says what became of its own cache: the prefill worker lost it, or the decode worker
        # still has what the other had lost.
        lost = before is not None and found == (not answer.timing.prefill_worker)
        self._held[request.trajectory_id] = Held(slot.id, tokens, lost)
        if len(self._held) > _REMEMBER:
            self._held.popitem(last=False)

    def flushed(self) -> None:
        """All prefix caches are gone: the version changed."""
        self._router.flushed()
        self._held.clear()

    def _computes_itself(self, request: GenerateRequest, target: Slot) -> bool:
        held = self._held.get(request.trajectory_id)
        if held is None or not held.lost or held.worker != target.id:
            return False
        return len(request.prompt_ids) - held.tokens <= self._config.short_prefill

    async def run(self, request: GenerateRequest, slot: Slot) -> Handoff | None:
        handoff = await cast(PrefillWorker, slot.worker).prefill(request)
        if handoff is not None:
            self._router.served(request, slot)
            slot.strikes = 0
        return handoff

    async def release(self, handoff: Handoff, target: Slot, decoders: Fleet) -> None:
        """Nobody will take this cache. Any decode worker can say so; when none does, it expires."""
        if not target.serving:
            target = next((slot for slot in decoders.serving(ANY, 0) if slot.role == "decode"), target)
        try:
            async with asyncio.timeout(self._config.answer):
                await cast(DecodeWorker, target.worker).release(handoff)
        except Exception as error:  # whatever keeps the worker from passing it on
            _log.warning("a cache on worker %s stays until it expires: %r", handoff.worker, error)
