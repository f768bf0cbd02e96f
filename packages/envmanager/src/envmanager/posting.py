"""POST and read the answer, patiently: the one HTTP client of reward functions, judges and chat endpoints.

Invariants:
- a call is repeated only when repeating can help (no answer, 408, 425, 429, 5xx), `retries` times at most, always
  with the same idempotency key, which is a digest of the body
  (test_envmanager_rewards.py::test_retries_carry_one_key);
- at most `concurrency` calls are on the wire (test_envmanager_rewards.py::test_concurrency_is_bounded);
- an answer is read up to LARGEST_ANSWER bytes, and what is longer is an error
  (test_envmanager_rewards.py::test_wrong_answers_are_errors).
"""

import asyncio
import hashlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import msgspec

from envmanager.backoff import backoff
from envmanager.checks import check_count, check_extra, check_seconds
from envmanager.errors import RolloutError
from envmanager.stats import Histogram

if TYPE_CHECKING:
    import aiohttp

# A score or a turn fits many times; what is longer is not an answer.
LARGEST_ANSWER = 4 << 20
LONGEST_WAIT_S = 60.0
REPEATABLE = frozenset({408, 425, 429})


class PostStats(msgspec.Struct):
    """Calls that were answered or failed, tries that were repeated, and the milliseconds of each try."""

    answered: int = 0
    failed: int = 0
    retries: int = 0
    milliseconds: Histogram = msgspec.field(default_factory=Histogram)


class _TryAgain(Exception):
    """Raised when a try failed in a way that a repetition may mend; `after` is what the server asked for."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class Posts:
    """POSTs JSON to one URL; what finally fails is an error of the `failure` kind. Needs the extra `http`."""

    def __init__(
        self,
        url: str,
        failure: type[RolloutError],
        *,
        timeout: float = 60.0,
        retries: int = 3,
        concurrency: int = 64,
        headers: Mapping[str, str] | None = None,
        first_wait: float = 1.0,
    ) -> None:
        check_seconds("timeout", timeout)
        check_count("retries", retries, 0)
        check_count("concurrency", concurrency, 1)
        check_extra("aiohttp", "http", f"calling {url}")
        self.url = url
        self.stats = PostStats()
        self._failure = failure
        self._timeout = timeout
        self._retries = retries
        self._first_wait = first_wait
        self._headers = {"Content-Type": "application/json"} | dict(headers or {})
        self._wire = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._jitter = random.Random(0)

    async def send(self, body: bytes, path: str = "") -> bytes:
        """The body of the 200 that answers a POST to the URL, or to a path below it."""
        headers = self._headers | {"Idempotency-Key": hashlib.sha256(body).hexdigest()}
        try:
            answer = await self._tries(self.url + path, body, headers)
        except self._failure:
            self.stats.failed += 1
            raise
        self.stats.answered += 1
        return answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _tries(self, url: str, body: bytes, headers: dict[str, str]) -> bytes:
        attempt = 0
        while True:
            try:
                async with self._wire:
                    return await self._try(url, body, headers)
            except _TryAgain as reason:
                if attempt == self._retries:
                    raise self._failure(f"{url}: {reason}, after {attempt + 1} tries") from reason
                delay = max(reason.after, backoff(attempt, self._jitter, self._first_wait, LONGEST_WAIT_S))
            self.stats.retries += 1
            attempt += 1
            await asyncio.sleep(delay)

    async def _try(self, url: str, body: bytes, headers: dict[str, str]) -> bytes:
        import aiohttp

        if self._session is None:
            # A bound of the connector's own would let calls run out of time before they are on the wire.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=self._timeout)
            )
        began = asyncio.get_running_loop().time()
        try:
            async with self._session.post(url, data=body, headers=headers) as response:
                answer = await _limited(response.content)
        except TimeoutError as error:
            raise _TryAgain(f"no answer within {self._timeout} s") from error
        except aiohttp.ClientError as error:
            raise _TryAgain(f"{type(error).__name__} {error}") from error
        finally:
            self.stats.milliseconds.add(round((asyncio.get_running_loop().time() - began) * 1000))
        return self._accepted(url, response.status, response.headers.get("Retry-After", ""), answer)

    def _accepted(self, url: str, status: int, after: str, answer: bytes) -> bytes:
        """The answer, or the error that it is."""
        if status == 200 and len(answer) <= LARGEST_ANSWER:
            return answer
        text = f"answered {status} {answer[:200].decode(errors='replace')!r}"
        if status in REPEATABLE or status >= 500:
            raise _TryAgain(text, min(float(after), LONGEST_WAIT_S) if after.isdecimal() else 0.0)
        size = f" and more than {LARGEST_ANSWER} bytes" if status == 200 else ""
        raise self._failure(f"{url} {text}{size}; repeating would not change that")


class Caller:
    """What all that call through `Posts` have in common: counts, an end, and use as an async context."""

    def __init__(self, posts: Posts) -> None:
        self._posts = posts

    def stats(self) -> PostStats:
        return self._posts.stats

    async def close(self) -> None:
        await self._posts.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _limited(stream: "aiohttp.StreamReader") -> bytes:
    """A body; of a longer one than LARGEST_ANSWER only so much that it shows."""
    body = bytearray()
    while len(body) <= LARGEST_ANSWER and (piece := await stream.read(1 << 16)):
        body += piece
    return bytes(body)
