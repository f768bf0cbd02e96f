"""Environments on another machine, behind `envmanager serve-env`.

Invariants:
- each episode has an id of its own and its calls are numbered, so a repeated request is answered again, not
  executed again, and a late one reaches no other episode
  (test_envmanager_http.py::test_a_repeated_step_is_not_taken_twice);
- an environment that the server has lost is an infrastructure failure
  (test_envmanager_http.py::test_a_lost_environment_is_known).
"""

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from envmanager.backends.wire import PENDING, Ask, Call, Told, opened
from envmanager.checks import check_url
from envmanager.errors import InfrastructureError
from envmanager.posting import Caller, Posts


def headers_of(token: str, poll_s: float) -> dict[str, str]:
    """What each call says: whose it is, and how long it waits for a server that is not done."""
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    return {"Content-Type": "application/msgpack", "Prefer": f"wait={poll_s / 2:g}"} | authorization


class HTTPBackend(Caller):
    """A factory of environments at a server's URL. Needs the extra `http`. Use it as an async context, or close it.

    A call that takes long is asked for again and again, as long as its deadline allows; the environment does not
    notice. So is a reset while the server is full. A server that is silent for `poll_s` has `retries` further tries.
    """

    blocking = False

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        poll_s: float = 60.0,
        retries: int = 5,
        concurrency: int = 1024,
        headers: Mapping[str, str] | None = None,
        first_wait: float = 0.5,
    ) -> None:
        check_url(url)
        posts = Posts(
            url.rstrip("/"),
            InfrastructureError,
            timeout=poll_s,
            retries=retries,
            concurrency=concurrency,
            headers=headers_of(token, poll_s) | dict(headers or {}),
            first_wait=first_wait,
        )
        super().__init__(posts)

    def __call__(self, key: str) -> "HTTPEnv":
        return HTTPEnv(self._posts, key)


class HTTPEnv:
    """One episode's environment on the server at the posts' URL, or at a path or URL behind it."""

    def __init__(self, posts: Posts, key: str, at: str = "") -> None:
        self._posts = posts
        self._key = key
        self._path = f"{at}/envs/{uuid.uuid4().hex}"
        self._number = 0
        self.task = "default"

    async def reset(self, seed: int | None = None) -> Any:
        self.task, *result = await self._call("reset", [self._key, seed])
        return result

    async def step(self, action: str) -> Any:
        return await self._call("step", action)

    async def close(self) -> None:
        if self._number:
            await self._call("close", None)

    async def _call(self, call: Call, argument: Any) -> Any:
        self._number += 1
        body = msgspec.msgpack.encode(Ask(self._number, call, argument))
        while (told := await self._told(body)).kind == PENDING:
            pass
        return opened(told)

    async def _told(self, body: bytes) -> Told:
        answer = await self._posts.send(body, self._path)
        try:
            return msgspec.msgpack.decode(answer, type=Told)
        except msgspec.MsgspecError as error:
            raise InfrastructureError(f"{self._posts.url}{self._path} sent what is no reply ({error})") from error
