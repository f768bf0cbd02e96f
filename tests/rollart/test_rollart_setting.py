"""What a run's episodes are bounded by."""

from __future__ import annotations

from pathlib import Path

from rollart.config import load_config
from rollart.runtime.setting import Setting, prepare_model


async def test_an_episodes_bounds_are_its_tasks_own_and_else_those_of_the_rollout(tmp_path: Path) -> None:
    config = load_config(
        overrides=[
            "rollout={reward_timeout_s: 7, step_timeout_s: 3, episode_timeout_s: 50}",
            "tasks={a: {episode_timeout_s: 700}, b: {step_timeout_s: 1, max_turns: 4}}",
        ]
    )
    setting = Setting(config, prepare_model(config, tmp_path))
    a, b = setting.limits("a/1"), setting.limits("b/1")
    assert (a.reward_timeout, a.step_timeout, a.episode_timeout) == (7, 3, 700)
    assert (b.reward_timeout, b.step_timeout, b.episode_timeout, b.max_turns) == (7, 1, 50, 4)
    await setting.close()
