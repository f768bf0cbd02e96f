"""A run of thirty iterations whose every part can be found and killed: `rollart` as a person starts it, and the
servers that it calls.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.recorded import RECORD

from resmgr.embedded import EmbeddedServer

ROOT = Path(__file__).parents[2]
ITERATIONS = 30
BATCH = 16
ENVIRONMENT = "tests.chaos.walk:Walk"
CONFIG = """
run: {{name: chaos, folder: {folder}, iterations: {iterations}}}
tasks:
  walk:
    kind: env
    env: "{env}"
    isolate: {isolate}
    max_tokens: 2
    latest_only: true
    reward: {reward}
model: {{hidden: 32}}
generation: {{workers: {engines}, max_model_len: 512}}
buffer: {{batch_groups: 4, group_size: 4, drop_uniform: false, spare_members: 1}}
rollout: {{concurrency: 24}}
weights: {{timeout_s: 20}}
eval: {{every: 100, episodes: 8}}
checkpoint: {{every: 3}}
"""
MARK = "ROLLART_CHAOS_RUN"
START_S = 300
FINISH_S = 300


class Attempt:
    """One process of `rollart train` or `rollart resume`, and what it started."""

    def __init__(self, folder: Path, run: Path, words: Sequence[str]) -> None:
        self.mark = uuid.uuid4().hex
        self._socket = str(EmbeddedServer(run / "metadata").socket_path).encode()
        self.output = folder / f"{self.mark}.log"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.recorded", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark, RECORD: str(folder / "record.jsonl")},
                cwd=ROOT,
                start_new_session=True,
            )

    def reached(self, step: int) -> None:
        """Waits until the run has finished `step`."""
        deadline = time.monotonic() + START_S
        while not re.search(rf"\[{step}/{ITERATIONS}\]", self.text()):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def text(self) -> str:
        return self.output.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def processes(self) -> list[int]:
        """By the mark in their environment, which the metadata server overwrites with its title."""
        mark = f"{MARK}={self.mark}".encode()
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if mark in _read(pid, "environ") or self._socket in _read(pid, "cmdline")]

    def nothing_left(self) -> bool:
        """The kernel and keepers take a moment to end what a killed process leaves."""
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not left

    def kill(self, of_it: Callable[[int], bool]) -> None:
        """Kills one process of the run."""
        found = [pid for pid in self.processes() if of_it(pid)]
        assert found, "no process of this run is that part"
        os.kill(found[0], signal.SIGKILL)


def says(words: str) -> Callable[[int], bool]:
    """Processes with these words in their command line."""
    return lambda pid: words.encode() in _read(pid, "cmdline").replace(b"\0", b" ")


def logs_to(name: str) -> Callable[[int], bool]:
    """Processes that have this file open."""

    def found(pid: int) -> bool:
        try:
            return any(os.readlink(link).endswith(name) for link in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            return False

    return found


NURSERY = "envmanager.backends.nursery"


def nursery(pid: int) -> bool:
    """The process that environments are forked from."""
    return says(NURSERY)(pid) and not says(NURSERY)(_parent(pid))


def environment(pid: int) -> bool:
    """A process that plays an episode: a child of a keeper, which is a child of the nursery."""
    return says(NURSERY)(pid) and says(NURSERY)(_parent(pid)) and says(NURSERY)(_parent(_parent(pid)))


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


class Server:
    """A server that the run calls, on a port of its own, where it comes back after a death."""

    def __init__(self, *words: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._words = [*words, "--port", str(self.port)]
        self._process = self._started()

    def kill(self) -> None:
        self._process.kill()
        self._gone()

    def start_again(self) -> None:
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        """Returns when it has said where it listens."""
        process = subprocess.Popen(
            [sys.executable, "-m", *self._words], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert f":{self.port}" in process.stdout.readline()
        return process

    @contextmanager
    def running(self) -> Iterator[Server]:
        try:
            yield self
        finally:
            self._process.terminate()
            self._gone()

    def _gone(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(30)


class World:
    """The servers of a run and its configuration. `remote` plays the environments behind a server too; `runs` is
    where the run's folder lies, if not in `folder`.
    """

    def __init__(
        self, folder: Path, stack: ExitStack, *, engines: int = 1, remote: bool = False, runs: Path | None = None
    ) -> None:
        self.folder = folder
        self.run = (runs or folder) / "chaos"
        serve_reward = ("rollart.cli.main", "serve-reward", "tests.chaos.scoring:score", "--least", "1")
        self.reward = stack.enter_context(Server(*serve_reward).running())
        env = ENVIRONMENT
        if remote:
            self.environments = stack.enter_context(Server("envmanager.cli", "serve-env", ENVIRONMENT).running())
            env = f"http://127.0.0.1:{self.environments.port}"
        reward = f"http://127.0.0.1:{self.reward.port}/function/score"
        isolate = str(not remote).lower()
        self.config = folder / "chaos.yaml"
        self.config.write_text(
            CONFIG.format(
                folder=self.run.parent,
                iterations=ITERATIONS,
                env=env,
                isolate=isolate,
                reward=reward,
                engines=engines,
            )
        )

    def train(self) -> Attempt:
        return Attempt(self.folder, self.run, ["train", str(self.config)])

    def resume(self) -> Attempt:
        return Attempt(self.folder, self.run, ["resume", str(self.run)])
