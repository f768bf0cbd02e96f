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


async def test_a_probe_leaves_room_for_its_answers_in_a_short_context(tmp_path: Path) -> None:
    config = load_config(
        overrides=[
            "generation.max_model_len=30",
            "tasks={a: {kind: env, env: 'gymnasium:Taxi-v4', max_tokens: 9, chat: plain}}",
        ]
    )
    setting = Setting(config, prepare_model(config, tmp_path))
    probe = setting.probe(4)
    assert len(probe.prompts) == 4
    assert max(map(len, probe.prompts)) == 30 - probe.max_tokens
    await setting.close()
