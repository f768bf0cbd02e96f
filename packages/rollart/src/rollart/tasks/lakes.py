"""FrozenLake as a task: each move is one symbol, and generation is limited to the four moves."""

from __future__ import annotations

from collections.abc import Iterator

from envmanager import Env, Trajectory
from llmproxy import Sampling
from rollart.chat import Codec, Plain
from rollart.policy import TurnSettings
from rollart.tasks.frozenlake import FrozenLakeTask


class LakeTask:
    """Plays `lakes`, `symbols` generated symbols a turn. Raises ValueError when a move is not one token."""

    blocking = False

    def __init__(self, name: str, lakes: FrozenLakeTask, codec: Codec, *, symbols: int, context: int) -> None:
        self._lakes = lakes
        self._codec = codec
        self.settings = TurnSettings(
            task=name,
            format=Plain(codec),
            max_tokens=symbols,
            sampling=Sampling(
                allowed_token_ids=tuple(_one_token(codec, action) for action in lakes.actions),
                ignore_eos=True,
                logprobs="processed",
            ),
            latest_only=True,
            context=context,
        )

    def train_keys(self, seed: int) -> Iterator[str]:
        return self._lakes.train_keys(seed)

    def eval_keys(self, n: int) -> list[str]:
        return self._lakes.eval_keys(n)

    def make_env(self, key: str) -> Env:
        return self._lakes.make_env(key)

    async def reward(self, trajectory: Trajectory) -> float:
        """What the environment paid over the episode."""
        return sum(turn.reward for turn in trajectory.turns)

    async def close(self) -> None:
        """Nothing to end: lakes are plain objects."""

    def probe_prompts(self, n: int) -> list[list[int]]:
        return [self._codec.encode(self.make_env(key).reset(seed=0)[0]) for key in self.eval_keys(n)]


def _one_token(codec: Codec, action: str) -> int:
    tokens = codec.encode(action)
    if len(tokens) != 1:
        raise ValueError(f"its tokenizer makes {len(tokens)} tokens of the action {action!r}; it must be one")
    return tokens[0]
