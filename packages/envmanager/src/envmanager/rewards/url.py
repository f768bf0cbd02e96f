"""A serverless function as a reward client: one HTTP POST for each trajectory.

Invariant: an answer without a finite `reward` is an error
(test_envmanager_rewards.py::test_wrong_answers_are_errors).
"""

from collections.abc import Callable
from typing import Any

import msgspec

from envmanager.checks import check_url
from envmanager.errors import RewardError
from envmanager.posting import Caller, Posts
from envmanager.values import Trajectory


class Answer(msgspec.Struct):
    """What the function must answer, as JSON; further fields are ignored."""

    reward: float


class URLReward(Caller):
    """POSTs `encode(trajectory)` to the URL and reads `{"reward": number}`; `options` are those of `Posts`:
    timeout, retries, concurrency, headers, first_wait. Use it as an async context, or close it.
    """

    def __init__(
        self, url: str, *, encode: Callable[[Trajectory], bytes] = msgspec.json.encode, **options: Any
    ) -> None:
        check_url(url)
        super().__init__(Posts(url, RewardError, **options))
        self._encode = encode

    async def __call__(self, trajectory: Trajectory) -> float:
        answer = await self._posts.send(self._encode(trajectory))
        try:
            return msgspec.json.decode(answer, type=Answer).reward
        except msgspec.MsgspecError as error:
            text = answer[:200].decode(errors="replace")
            said = f'{self._posts.url} answered {text!r}; answer {{"reward": number}} ({error})'
            raise RewardError(said) from error
