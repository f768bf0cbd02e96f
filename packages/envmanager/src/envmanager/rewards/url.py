"""A serverless function as a reward client: one HTTP POST for each trajectory.

Invariants:
- a call is repeated only when repeating can help (no answer, 408, 425, 429, 5xx), `retries` times at most, always
  with the same idempotency key, which is a digest of the body
  (test_envmanager_rewards.py::test_retries_carry_one_key);
- at most `concurrency` calls are on the wire (test_envmanager_rewards.py::test_concurrency_is_bounded);
- an answer without a finite `reward` is an error (test_envmanager_rewards.py::test_wrong_answers_are_errors).
"""

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from envmanager.backoff import backoff
from envmanager.errors import RewardError
from envmanager.stats import Histogram
from envmanager.values import Trajectory

if TYPE_CHECKING:
    import aiohttp

# A score and its explanation fit many times; what is longer is not an answer.
LARGEST_ANSWER = 1 << 20
REPEATABLE = frozenset({408, 425, 429})


class Answer(msgspec.Struct):
    """What the function must answer, as JSON; further fields are ignored."""

    reward: float


class URLStats(msgspec.Struct):
    """Calls that were scored or failed, tries that were repeated, and the milliseconds of each try."""

    scored: int = 0
    failed: int = 0
    retries: int = 0
    milliseconds: Histogram = msgspec.field(default_factory=Histogram)


class _TryAgain(Exception):
    """Raised when a try failed in a way that a repetition may mend; `after` is what the server asked for."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class URLReward:
    """POSTs `encode(trajectory)` to the URL and reads `{"reward": number}`. Needs the extra `http`. Close it at
    the end.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        retries: int = 3,
        concurrency: int = 64,
        first_wait: float = 1.0,
        headers: Mapping[str, str] | None = None,
        encode: Callable[[Trajectory], bytes] = msgspec.json.encode,
    ) -> None:
        if timeout <= 0 or retries < 0 or concurrency < 1:
            given = f"timeout={timeout}, retries={retries}, concurrency={concurrency}"
            raise ValueError(f"{given}: use a positive timeout, at least 0 retries and a concurrency of at least 1")
        self.url = url
        self._timeout = timeout
        self._retries = retries
        self._first_wait = first_wait
        self._headers = {"Content-Type": "application/json"} | dict(headers or {})
        self._encode = encode
        self._wire = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._stats = URLStats()
        self._jitter = random.Random(0)

    async def __call__(self, trajectory: Trajectory) -> float:
        body = self._encode(trajectory)
        headers = self._headers | {"Idempotency-Key": hashlib.sha256(body).hexdigest()}
        try:
            reward = await self._tries(body, headers)
        except RewardError:
            self._stats.failed += 1
            raise
        self._stats.scored += 1
        return reward

    def stats(self) -> URLStats:
        return self._stats

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _tries(self, body: bytes, headers: dict[str, str]) -> float:
        attempt = 0
        while True:
            try:
                async with self._wire:
                    return await self._try(body, headers)
            except _TryAgain as reason:
                if attempt == self._retries:
                    raise RewardError(f"{self.url}: {reason}, after {attempt + 1} tries") from reason
                delay = max(reason.after, backoff(attempt, self._jitter, self._first_wait))
            self._stats.retries += 1
            attempt += 1
            await asyncio.sleep(delay)

    async def _try(self, body: bytes, headers: dict[str, str]) -> float:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout))
        began = asyncio.get_running_loop().time()
        try:
            async with self._session.post(self.url, data=body, headers=headers) as response:
                answer = await _limited(response.content)
        except TimeoutError as error:
            raise _TryAgain(f"no answer within {self._timeout} s") from error
        except aiohttp.ClientError as error:
            raise _TryAgain(f"{type(error).__name__} {error}") from error
        finally:
            self._stats.milliseconds.add(round((asyncio.get_running_loop().time() - began) * 1000))
        return _reward(self.url, response.status, response.headers.get("Retry-After", ""), answer)


def _reward(url: str, status: int, after: str, answer: bytes) -> float:
    """The reward in an answer, or the error that it is."""
    text = answer[:200].decode(errors="replace")
    if status in REPEATABLE or status >= 500:
        raise _TryAgain(f"answered {status} {text!r}", min(float(after), 60.0) if after.isdecimal() else 0.0)
    if status != 200:
        raise RewardError(f"{url} answered {status} {text!r}; repeating would not change that")
    try:
        return msgspec.json.decode(answer, type=Answer).reward
    except msgspec.MsgspecError as error:
        raise RewardError(f'{url} answered {text!r}; answer {{"reward": number}} ({error})') from error


async def _limited(stream: Any) -> bytes:
    """A body of at most LARGEST_ANSWER bytes; the rest of a longer one is left unread, and does not decode."""
    body = bytearray()
    while len(body) <= LARGEST_ANSWER and (piece := await stream.read(1 << 16)):
        body += piece
    return bytes(body)
