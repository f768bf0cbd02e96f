"""The training role: versions count, what is published is what was trained, a restore goes on from there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace as Simple
from typing import Any

import pytest

from rollart.models import make_tiny_qwen3
from rollart.roles.actor_train import ActorTrain
from rollart.trainers.batch import TrainBatch, build_batch
from rollart.trainers.config import TrainerConfig
from weightsync import Manifest, Subscriber, open_store


def batch() -> TrainBatch:
    def trajectory(token: int, reward: float) -> Simple:
        turn = Simple(prompt_ids=[2, 3, 4], token_ids=[token], logprobs=[-1.4], spans=[(0, 0, 1)], new_segment=True)
        return Simple(task="T", turns=[turn], reward=reward)

    return build_batch([[trajectory(9, 1.0), trajectory(10, 0.0)]], allowed={"T": [9, 10, 11, 12]})


async def started(tmp_path: Path, restore: str | None = None) -> ActorTrain:
    model = make_tiny_qwen3(tmp_path / "model", 0)
    store = f"file:{tmp_path / 'store'}"
    actor = ActorTrain(str(model), TrainerConfig(), [store], 1 << 20, 2, restore)
    await actor.setup()
    return actor


async def test_it_publishes_what_it_trained(tmp_path: Path) -> None:
    actor = await started(tmp_path)
    assert await actor.held_version() == 0
    await actor.train_step(batch())
    with pytest.raises(ValueError, match="version 2 was asked for, the trainer holds 1"):
        await actor.publish(2)
    push = await actor.publish(1)
    loaded = await _read(tmp_path, 1, push.digest)
    live = actor._trainer.named_tensors()
    assert loaded == {name: tensor.contiguous().numpy().tobytes() for name, tensor in live.items()}
    await actor.close()


async def _read(tmp_path: Path, version: int, digest: str = "") -> dict[str, bytes]:
    """What the store holds of a version, by tensor."""
    store = open_store(f"file:{tmp_path / 'store'}")
    subscriber = Subscriber(store)
    loaded: dict[str, bytes] = {}
    commit = await subscriber.commit(
        await subscriber.prefetch(version, timeout=10), lambda name, tensor: loaded.update({name: bytes(tensor.data)})
    )
    assert digest in ("", commit.digest)
    await subscriber.close()
    await store.close()
    return loaded


async def test_what_is_published_is_what_was_held_though_training_goes_on(tmp_path: Path) -> None:
    actor = await started(tmp_path)
    await actor.train_step(batch())
    held = {name: tensor.clone() for name, tensor in actor._trainer.named_tensors().items()}
    publish, stored = actor._publisher.publish, asyncio.Event()

    async def slow(*arguments: Any) -> Manifest:
        await stored.wait()
        return await publish(*arguments)

    actor._publisher.publish = slow  # type: ignore[method-assign, assignment]
    pushing = asyncio.create_task(actor.publish(1))
    await asyncio.sleep(0)
    await actor.train_step(batch())  # does not wait for the store
    assert await actor.held_version() == 2 and not pushing.done()
    stored.set()
    assert (await pushing).version == 1
    loaded = await _read(tmp_path, 1)
    assert loaded == {name: tensor.contiguous().numpy().tobytes() for name, tensor in held.items()}
    await actor.close()


async def test_a_restored_actor_goes_on_from_its_version(tmp_path: Path) -> None:
    actor = await started(tmp_path)
    await actor.train_step(batch())
    place = tmp_path / "checkpoint"
    place.mkdir()
    await actor.save(str(place))
    before = await actor.logprobs([[2, 3]], [[9]], [9, 10])
    await actor.close()
    again = await started(tmp_path, restore=str(place))
    assert await again.held_version() == 1
    assert await again.logprobs([[2, 3]], [[9]], [9, 10]) == before
    await again.close()
