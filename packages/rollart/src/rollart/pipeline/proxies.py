"""One proxy or several over the same engines behind one face: the controller's gateway, the policies' generator.

Each proxy serves the trajectories that fall to it, as one embedded in each environment host does; no request passes
through another. Invariants (tests/rollart/test_rollart_proxies.py):
- suspend, update and resume end only when every proxy has acknowledged; one that fails, or is silent for
  `patience_s`, is named, after the others have been heard;
- an engine is updated once, by the first proxy, while the gates of all are shut; the others take over its
  acknowledgements;
- an update during which every engine was lost is made again, on what replaces them, for `patience_s` at most;
- no gate opens before every proxy holds the version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar
from zlib import crc32

from llmproxy import Ack, GenerateRequest, GenerateResult, LLMProxy, UpdateFailed
from rollart.errors import RollArtError

T = TypeVar("T")
log = logging.getLogger(__name__)

# A process takes tens of seconds to come back; its calls fail at once until then.
_AGAIN_S = 1.0


class ProxyFailed(RollArtError):
    """Raised when a proxy did not do what all of them must do together."""

    def __init__(self, proxy: str, step: str, reason: str) -> None:
        super().__init__(f"{proxy} did not {step}: {reason}")
        self.proxy = proxy
        self.step = step


class Proxies:
    """Fans every step of a weight update out to all proxies."""

    def __init__(self, proxies: Sequence[LLMProxy], *, patience_s: float = 1200.0) -> None:
        """They serve the same workers, which the first one updates."""
        self._proxies = list(proxies)
        self._patience_s = patience_s

    def generate(self, request: GenerateRequest) -> Coroutine[Any, Any, GenerateResult]:
        """By the proxy that has the trajectory, the same for all its turns."""
        return self._proxies[crc32(request.trajectory_id.encode()) % len(self._proxies)].generate(request)

    async def suspend(self) -> None:
        await self._all("suspend", lambda proxy: proxy.suspend())

    async def update(self, version: int) -> list[Ack]:
        """Raises ProxyFailed when no engine holds the version, or a proxy does not take it over."""
        acks = await self._updated(version)
        for number, proxy in enumerate(self._proxies[1:], 1):
            await self._asked(number, f"take over version {version}", _soon(proxy, version, acks))
        return acks

    async def resume(self) -> None:
        await self._all("resume", lambda proxy: proxy.resume())

    async def close(self) -> None:
        for proxy in self._proxies:
            await proxy.close()

    async def _all(self, step: str, ask: Callable[[LLMProxy], Awaitable[None]]) -> None:
        answers = await asyncio.gather(
            *(self._asked(number, step, ask(proxy)) for number, proxy in enumerate(self._proxies)),
            return_exceptions=True,
        )
        for answer in answers:
            if answer is not None:
                raise answer

    async def _updated(self, version: int) -> list[Ack]:
        """Waits for an engine that comes back when all are lost."""
        clock = asyncio.get_running_loop().time
        deadline, level = clock() + self._patience_s, logging.WARNING
        while True:
            try:
                return await self._asked(0, f"update to version {version}", self._proxies[0].update(version))
            except ProxyFailed as failed:
                if not _all_lost(failed.__cause__) or clock() >= deadline:
                    raise
                log.log(level, "%s; asking again until one is back", failed)
                level = logging.DEBUG  # told once
            await asyncio.sleep(_AGAIN_S)

    async def _asked(self, number: int, step: str, answer: Awaitable[T]) -> T:
        """A proxy's acknowledgement; whatever comes in its place is its failure."""
        try:
            async with asyncio.timeout(self._patience_s):
                return await answer
        except TimeoutError:
            raise ProxyFailed(f"proxy-{number}", step, f"no acknowledgement in {self._patience_s:g} s") from None
        except Exception as error:  # whatever went wrong, the gates are not where they should be
            raise ProxyFailed(f"proxy-{number}", step, f"{type(error).__name__}: {error}") from error


def _all_lost(error: BaseException | None) -> bool:
    return isinstance(error, UpdateFailed) and all(ack.lost for ack in error.failures)


async def _soon(proxy: LLMProxy, version: int, acks: Sequence[Ack]) -> None:
    proxy.accept(version, acks)
