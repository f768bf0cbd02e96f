"""A run whose parts are killed goes on, or ends with a typed error and resumes from its checkpoint; nothing is lost,
repeated or too old.

Each part is killed with signal 9 at a moment that the seed chooses, in a run of thirty iterations. Another seed:
ROLLART_CHAOS_SEED=1 python -m pytest tests/chaos
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from tests.chaos.chaos_run import BATCH, FINISH_S, ITERATIONS, Attempt, World, environment, logs_to, nursery, says
from tests.recorded import read_record

from rollart.config import load_config
from rollart.observe.metrics import read_metrics
from rollart.observe.runinfo import read_run
from rollart.runtime.checkpoint import Checkpoints
from rollart.runtime.setting import Setting
from samplebuffer.state import BufferState

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

SEED = os.environ.get("ROLLART_CHAOS_SEED", "0")
KILLS: dict[str, Callable[[World, Attempt], None]] = {
    "driver": lambda world, attempt: os.kill(attempt.process.pid, signal.SIGKILL),
    "engine": lambda world, attempt: attempt.kill(logs_to("logs/gen-0.log")),
    "trainer": lambda world, attempt: attempt.kill(logs_to("logs/train-0.log")),
    "metadata": lambda world, attempt: attempt.kill(says("valkey-server")),
    "store": lambda world, attempt: attempt.kill(says("mooncake_master")),
    "environment": lambda world, attempt: attempt.kill(environment),
    "nursery": lambda world, attempt: attempt.kill(nursery),
    "environment server": lambda world, attempt: world.environments.kill(),
    "reward server": lambda world, attempt: world.reward.kill(),
}
# The trainer's process raises what it finds of the store, with its own name before.
TYPED = re.compile(r"(WorkerDied|WorkerLost|StoreUnavailable|BackendDown|RemoteError: .*\.StoreUnavailable):")


@pytest.mark.parametrize("part", KILLS)
def test_a_killed_part_costs_time_and_nothing_else(tmp_path: Path, part: str) -> None:
    chance = random.Random(f"{part} {SEED}")
    step = chance.randint(4, ITERATIONS - 4)
    with ExitStack() as stack:
        world = World(tmp_path, stack, engines=1 + (part == "engine"), remote=part == "environment server")
        attempt = world.train()
        stack.callback(lambda: attempt.end())
        attempt.reached(step)
        time.sleep(chance.random())  # not a wait: any moment of the next step
        KILLS[part](world, attempt)
        if part == "environment server":
            world.environments.start_again()
        if part == "reward server":
            world.reward.start_again()
        ended = attempt.process.wait(FINISH_S)
        assert attempt.nothing_left()
        if ended != 0:
            check_failure(world.run, attempt, driver=part == "driver")
            attempt = world.resume()
            assert attempt.process.wait(FINISH_S) == 0, attempt.text()
            assert attempt.nothing_left()
    check_metrics(world.run)
    check_tasks(world)


def test_a_full_disk_ends_the_run_and_room_resumes_it(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    with ExitStack() as stack:
        stack.callback(lambda: subprocess.run(["umount", "--lazy", str(disk)], check=True))
        world = World(tmp_path, stack, runs=disk)
        attempt = world.train()
        stack.callback(lambda: attempt.end())
        attempt.reached(random.Random(f"disk {SEED}").randint(4, ITERATIONS - 4))
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        assert attempt.process.wait(FINISH_S) != 0
        assert "No space left" in attempt.text()
        assert attempt.nothing_left()
        filler.unlink()
        attempt = world.resume()
        assert attempt.process.wait(FINISH_S) == 0, attempt.text()
        assert attempt.nothing_left()
        check_metrics(world.run)
        check_tasks(world)


def check_failure(run: Path, attempt: Attempt, *, driver: bool) -> None:
    """The run says how it stands, and why, in words of its own."""
    info = read_run(run)
    assert info is not None
    assert info.status == ("killed" if driver else "failed"), attempt.text()
    assert driver or TYPED.match(info.reason), info.reason


def check_metrics(run: Path) -> None:
    """Every iteration once, the ledger balanced in each, whole batches, nothing beyond the bound."""
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, ITERATIONS + 1))
    ends = ("delivered", "surplus", "stale", "filtered", "failed", "cancelled", "running", "buffered")
    for row in rows:
        assert row["ledger/issued"] == sum(row[f"ledger/{column}"] or 0 for column in ends)
        assert row["ledger/delivered"] == BATCH * (row["step"] or 0)
        assert (row["staleness/max"] or 0) <= 1
        assert row["staleness/over"] == 0
        assert row["parity/max_abs"] is None or row["parity/max_abs"] < 1e-3


def check_tasks(world: World) -> None:
    """Each key that was drawn was trained on once, or is still open; none before it was left out."""
    trained = [group["key"] for step in read_record(world.folder / "record.jsonl") for group in step["groups"]]
    assert len(trained) == len(set(trained)) == ITERATIONS * BATCH // 4
    checkpoints = Checkpoints(world.run / "checkpoints")
    assert checkpoints.steps() == [ITERATIONS - 3, ITERATIONS]
    last = checkpoints.latest()
    assert last is not None
    buffer = msgspec.msgpack.decode(checkpoints.read(last).buffer, type=BufferState)
    unfinished = [group.key for group in buffer.groups] + [task.key for task in buffer.waiting]
    assert not buffer.given_up
    assert not set(unfinished) & set(trained)
    setting = Setting(load_config(world.run / "config.yaml"), world.run / "model")
    assert set(unfinished) | set(trained) == set(islice(setting.train_keys(), buffer.drawn))
