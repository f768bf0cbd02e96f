"""Any of our environments behind OpenEnv's own server, for its client and for measurements.

python -m tests.envmanager.openenv_server ENV PORT [SESSIONS]   in an environment that has openenv
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from envmanager.naming import named


class Said(Action):
    message: str


class Told(Observation):
    text: str
    actions: list[str] = Field(default_factory=list)


def app(name: str, sessions: int) -> Any:
    make_env = named(name)

    class Served(Environment[Said, Told, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._env: Any = None

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Told:
            self._env = make_env(episode_id or "0")
            text, info = self._env.reset(seed=seed)
            return Told(text=text, actions=info.get("actions", []))

        def step(self, action: Said, timeout_s: float | None = None, **options: Any) -> Told:
            text, reward, terminated, truncated, _ = self._env.step(action.message)
            return Told(text=text, reward=reward, done=terminated or truncated)

        @property
        def state(self) -> State:
            return State()

    return create_fastapi_app(Served, Said, Told, max_concurrent_envs=sessions)


if __name__ == "__main__":
    sessions = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    uvicorn.run(app(sys.argv[1], sessions), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
