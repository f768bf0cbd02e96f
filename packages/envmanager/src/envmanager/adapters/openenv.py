"""Environments behind an OpenEnv server (`openenv:http://localhost:8000`), through OpenEnv's own client. Needs the
extra `openenv`.

Invariant: a lost server is an infrastructure failure, what the server refuses a data failure
(test_envmanager_openenv.py).
"""

from typing import Any

import msgspec
from openenv.core.generic_client import GenericEnvClient

from envmanager.errors import DataError, InfrastructureError


class OpenEnv:
    """Makes sessions at a server. An action that is a JSON object goes as it is, any other text as the field that
    `action` names; of an observation the field that `observation` names is told, or all of it as JSON.
    """

    blocking = False

    def __init__(self, url: str, *, action: str = "message", observation: str = "", task: str = "openenv") -> None:
        self._url = url
        self._fields = (action, observation)
        self._task = task

    def __call__(self, key: str) -> "OpenEnvSession":
        return OpenEnvSession(self._url, key, *self._fields, self._task)


class OpenEnvSession:
    """One episode: a connection of its own, on which the server keeps an environment."""

    def __init__(self, url: str, key: str, action: str, observation: str, task: str) -> None:
        self.task = task
        self._key = key
        self._action = action
        self._observation = observation
        self._client = GenericEnvClient(base_url=url)

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        result = await self._asked(self._connected_reset(seed))
        return self._text(result.observation), {"actions": ["0", "1"], **_plain(result.observation)}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        result = await self._asked(self._client.step(self._payload(action)))
        reward = 0.0 if result.reward is None else result.reward
        return self._text(result.observation), reward, bool(result.done), False, _plain(result.observation)

    async def close(self) -> None:
        await self._client.close()

    async def _connected_reset(self, seed: int | None) -> Any:
        await self._client.connect()
        return await self._client.reset(seed=seed, episode_id=self._key)

    async def _asked(self, call: Any) -> Any:
        try:
            return await call
        except (OSError, EOFError) as error:
            raise InfrastructureError(f"the OpenEnv server: {type(error).__name__}: {error}") from error
        except Exception as error:  # of its client's many, only the network's are the machinery's
            lost = "connection" in type(error).__name__.lower() or "connect" in str(error).lower()
            kind = InfrastructureError if lost else DataError
            raise kind(f"the OpenEnv server: {type(error).__name__}: {str(error)[:500]}") from error

    def _payload(self, action: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode(action, type=dict[str, Any])
        except msgspec.MsgspecError:
            return {self._action: action}

    def _text(self, observation: Any) -> str:
        if self._observation:
            return str(observation.get(self._observation, ""))
        return msgspec.json.encode(observation).decode()


def _plain(observation: Any) -> dict[str, Any]:
    """An environment may offer `actions` as any other does."""
    actions = observation.get("actions") if isinstance(observation, dict) else None
    return {"actions": actions} if actions else {}
