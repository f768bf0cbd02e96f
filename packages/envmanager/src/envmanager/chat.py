"""Models behind an OpenAI-compatible endpoint: to play (evaluation; such an answer has no token ids), and to judge.

Invariant: an answer without a message's text is an error, never an empty action
(test_envmanager_chat.py::test_wrong_answers).
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from envmanager.checks import check_url
from envmanager.errors import PolicyError, RewardError, RolloutError
from envmanager.posting import Caller, Posts
from envmanager.values import Action, Episode, Trajectory

Message = dict[str, str]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class _Text(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Text


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Chat:
    """`URL/chat/completions` of one model. `sampling` goes into each request (temperature, max_tokens, ...);
    `options` are those of `Posts`: timeout, retries, concurrency, first_wait.
    """

    def __init__(
        self,
        url: str,
        model: str,
        failure: type[RolloutError],
        api_key: str,
        sampling: dict[str, Any],
        **options: Any,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        check_url(url)
        self.posts = Posts(f"{url.rstrip('/')}/chat/completions", failure, headers=headers, **options)
        self._failure = failure
        self._request = {"model": model} | sampling

    async def say(self, messages: list[Message]) -> str:
        answer = await self.posts.send(msgspec.json.encode(self._request | {"messages": messages}))
        try:
            return msgspec.json.decode(answer, type=_Completion).choices[0].message.content
        except (msgspec.MsgspecError, IndexError) as error:
            text = answer[:200].decode(errors="replace")
            raise self._failure(f"{self.posts.url} answered {text!r}; no message in it ({error})") from error


class ChatPolicy(Caller):
    """Plays with a chat model. With `history` it is told the whole episode each turn, else only the latest
    observation. Use it as an async context, or close it.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str = "",
        system: str = "",
        history: bool = True,
        sampling: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._chat = Chat(url, model, PolicyError, api_key, sampling or {}, **options)
        super().__init__(self._chat.posts)
        self._system = system
        self._history = history

    async def act(self, episode: Episode) -> Action:
        text = await self._chat.say(self._messages(episode))
        return Action(text=text, new_segment=not self._history)

    def _messages(self, episode: Episode) -> list[Message]:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for turn in episode.turns if self._history else ():
            messages.append({"role": "user", "content": turn.observation})
            messages.append({"role": "assistant", "content": turn.action})
        return [*messages, {"role": "user", "content": episode.observation}]


def last_number(text: str) -> float:
    """The judge's verdict by default: the last number that it writes."""
    numbers = NUMBER.findall(text)
    if not numbers:
        raise RewardError(f"the judge wrote no number: {text[:200]!r}")
    return float(numbers[-1])


class JudgeReward(Caller):
    """A chat model as a reward client: `prompt(trajectory)` is the question, `parse(answer)` the reward."""

    def __init__(
        self,
        url: str,
        model: str,
        prompt: Callable[[Trajectory], str],
        *,
        parse: Callable[[str], float] = last_number,
        api_key: str = "",
        sampling: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._chat = Chat(url, model, RewardError, api_key, {"temperature": 0.0} | (sampling or {}), **options)
        super().__init__(self._chat.posts)
        self._prompt = prompt
        self._parse = parse

    async def __call__(self, trajectory: Trajectory) -> float:
        return self._parse(await self._chat.say([{"role": "user", "content": self._prompt(trajectory)}]))
