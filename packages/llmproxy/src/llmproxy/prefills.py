"""The first phase where prefill and decode are apart: who computes a context, who is told when nobody comes for it.

A request has its decode worker before it is prefilled, so that nothing lies between the end of the first phase and
the start of the second. Invariants (tests/llmproxy/test_llmproxy_phases.py, and both machines): no cache made by old
weights is used, none stays behind, and the loss of either worker costs only time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from .config import ProxyConfig
from .fleet import ANY, Fleet, Slot
from .routing import Router
from .values import GenerateRequest, Handoff
from .worker import DecodeWorker, PrefillWorker

_log = logging.getLogger(__name__)


class Prefills:
    """The prefill workers and the policy that chooses among them. `unsplit` counts requests that found none."""

    def __init__(self, fleet: Fleet, router: Router, config: ProxyConfig) -> None:
        self.unsplit = 0
        self._fleet = fleet
        self._router = router
        self._config = config

    def choose(self, request: GenerateRequest, target: Slot) -> Slot | None:
        """Who prefills for `target`; nobody when that does it itself."""
        if target.role != "decode":
            return None
        slot = self._router.choose(request, self._fleet)
        self.unsplit += slot is None
        return slot

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
