"""Policies without a model: to try an environment by chance or by hand."""

import random
from collections.abc import Callable

from envmanager.errors import DataError, PolicyError
from envmanager.threads import EnvThread
from envmanager.values import Action, Episode


def actions_of(episode: Episode) -> list[str]:
    """The actions that the environment offers in `info["actions"]`; those of earlier turns where it offers none
    now.
    """
    offered = episode.info.get("actions")
    if isinstance(offered, list | tuple) and offered and all(isinstance(action, str) for action in offered):
        episode.state = list(offered)
    if not episode.state:
        raise DataError(
            'the environment offers no info["actions"] (a list of str) at reset, which play by chance needs; '
            "name some: --actions a,b or RandomPolicy(actions=[...])"
        )
    return list(episode.state)


class RandomPolicy:
    """Chooses among `actions`, or among those that the environment offers."""

    def __init__(self, seed: int = 0, actions: list[str] | None = None) -> None:
        self._random = random.Random(seed)
        self._actions = actions

    async def act(self, episode: Episode) -> Action:
        return Action(text=self._random.choice(self._actions or actions_of(episode)))


class HumanPolicy:
    """Asks; the end of input ends the episode, or is an error where none has begun. It asks in a daemon's thread: one
    that is still asked keeps nobody from leaving.
    """

    def __init__(self, ask: Callable[[str], str] = input) -> None:
        self._ask = ask

    async def act(self, episode: Episode) -> Action | None:
        thread = EnvThread("keyboard", set())
        try:
            text, error = await thread.call(lambda: self._ask("> "))
        finally:
            thread.stop()
        if isinstance(error, EOFError) and episode.turns:
            return None
        if isinstance(error, EOFError):
            raise PolicyError("the input ended before the first action")
        if error is not None:
            raise error
        return Action(text=text)
