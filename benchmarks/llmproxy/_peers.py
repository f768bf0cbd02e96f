"""The gateway and its peers as processes over the same two mock workers, and the load on each."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

import msgspec

HERE = Path(__file__).parent
PEERS = Path(tempfile.gettempdir()) / "llmproxy-peers"
"""Each peer in an environment of its own; nothing of them is installed beside us."""
NEEDS = {"vllm-router": "vllm-router==0.1.17", "sglang-router": "sglang-router==0.3.2", "smg": "smg==1.13.0"}
INSTALL_LIMIT_S = 600
_TICK = 1e6 / os.sysconf("SC_CLK_TCK")


class Load(msgspec.Struct):
    """What one load of a router showed."""

    requests: int
    seconds: float
    p50_us: float
    cpu_us: float
    """Of all threads of the router, in total."""


def environment(peer: str, quick: bool) -> str:
    """The peer's folder of commands; raises OSError when it cannot be had."""
    home = PEERS / peer
    if (home / "ready").exists():
        return str(home / "bin")
    if quick:
        raise OSError("not installed: run without --quick first")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    command = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", NEEDS[peer]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1][:200])
    (home / "ready").touch()
    return str(home / "bin")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Process(AbstractContextManager["Process"]):
    """A program that listens on `port`."""

    def __init__(self, command: list[str], port: int, *, tolerated: float = 0.0) -> None:
        """`tolerated` is the share of requests that may fail under load."""
        self.port = port
        self._tolerated = tolerated
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def cpu_us(self) -> float:
        """User and system time of the process, all threads, and its children."""
        pids, total = [self._process.pid], 0.0
        while pids:
            pid = pids.pop()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            total += (int(fields[11]) + int(fields[12])) * _TICK
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        return total

    def ready(self, body: bytes, answer: Any, limit_s: float = 60.0) -> None:
        """Wait until a request comes back with the worker's answer."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                if (got := self.post(body)) != answer:
                    raise ValueError(f"the router on {self.port} changed an answer to {got}")
                return
            except OSError as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self._log.seek(0)
                    raise OSError(f"{error}: {self._log.read()[-500:].decode(errors='replace')}") from error
                time.sleep(0.2)

    def post(self, body: bytes) -> Any:
        headers = {"content-type": "application/json", "x-trajectory-id": "ready"}
        request = Request(f"http://127.0.0.1:{self.port}/v1/completions", body, headers)
        with urlopen(request, timeout=5) as response:
            return json.load(response)

    def load(
        self, connections: int, seconds: float, body: Path, *, path: str = "/v1/completions", named: bool = True
    ) -> Load:
        """Requests without pause over so many connections. Raises ValueError when more than `tolerated` failed."""
        before = self.cpu_us()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s"]
        command += ["-s", str(HERE / "_load.lua"), f"http://127.0.0.1:{self.port}", "--", path, str(body)]
        command.append("named" if named else "unnamed")
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        spent = self.cpu_us() - before
        told = json.loads(out.strip().splitlines()[-1])
        if told["errors"] + told["bad"] > self._tolerated * told["requests"]:
            raise ValueError(f"{' '.join(self._process.args)} failed requests: {told}")  # type: ignore[arg-type]
        return Load(told["requests"], told["seconds"], told["p50_us"], spent)


def mock(chunks: int) -> Process:
    port = free_port()
    return Process([sys.executable, str(HERE / "_mock.py"), str(port), str(chunks)], port)


def router(name: str, workers: list[Process], quick: bool) -> Process:
    """Ours routes by trajectory and task; peers by the cheapest policy that they have."""
    urls = [f"http://127.0.0.1:{worker.port}" for worker in workers]
    port = free_port()
    common = ["--host", "127.0.0.1", "--port", str(port)]
    if name.startswith("ours"):
        command = [sys.executable, "-m", "llmproxy.cli", "serve", *common, "--affinity", "default=any"]
        command += ["--log-level", "error"]
        command += ["--record", "--record-gb", "0.2"] if name == "ours, recording" else []
        return Process(command + [word for url in urls for word in ("--worker", url)], port)
    folder = environment(name, quick)
    command = [f"{folder}/{name}", *([] if name == "vllm-router" else ["launch"]), *common]
    command += ["--policy", "round_robin", "--prometheus-port", str(free_port()), "--log-level", "error"]
    # smg answers an error now and then to 0.9 MB bodies in quick succession.
    return Process([*command, "--worker-urls", *urls], port, tolerated=0.05)


def wrk_is_there() -> bool:
    return shutil.which("wrk") is not None
