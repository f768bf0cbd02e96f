"""Environments in processes beside OpenEnv's server: start, steps a second at 64 environments, CPU a step.

python benchmarks/envmanager/envmanager_openenv.py [--quick]

Ours: `SubprocessBackend`, each environment in a process that can be killed. Peer: OpenEnv 0.10 with its own client,
in an environment of its own (made in build/ at the first run). OpenEnv is measured both ways in which it is
deployed: sessions in one server, which nothing isolates from each other, and a server for each environment. The
environments are the same Python objects on both sides; rounds alternate. CPU counts both sides of the wire.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from envmanager.backends import SubprocessBackend

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
from tests.envmanager import peers  # noqa: E402

QUICK = "--quick" in sys.argv
COUNT, TURNS, ROUNDS, SERVERS = (16, 50, 1, 1) if QUICK else (64, 100, 3, 2)
TARGETS = {
    "trivial": "_trivial:trivial",
    "FrozenLake": f"gymnasium:FrozenLake-v1?is_slippery=false&max_episode_steps={TURNS}",
}
Row = dict[str, Any]


class Measured(NamedTuple):
    """Milliseconds of each start, steps a second of all together, CPU microseconds a step."""

    starts: list[float]
    rate: float
    cpu_us: float


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def cpu_s(pids: list[int]) -> float:
    """What processes have used so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def ours(target: str) -> Measured:
    loop = asyncio.get_running_loop()
    async with SubprocessBackend(target, reuse=False) as backend:
        starts, envs = [], []
        warm = backend("warm")  # the nursery's own start is not an environment's, no more than the server's is
        await warm.reset(seed=0)
        await warm.close()
        for n in range(COUNT):
            began = loop.time()
            envs.append(backend(str(n)))
            await envs[-1].reset(seed=n)
            starts.append((loop.time() - began) * 1000)

        async def walk(env: Any) -> None:
            for _ in range(TURNS - 1):
                observation, *_ = await env.step("left")
                assert isinstance(observation, str)

        pids = [os.getpid(), *descendants(os.getpid())]
        used, began = cpu_s(pids), loop.time()
        await asyncio.gather(*map(walk, envs))
        took, steps = loop.time() - began, COUNT * (TURNS - 1)
        return Measured(starts, steps / took, (cpu_s(pids) - used) / steps * 1e6)


@contextmanager
def server(target: str) -> Iterator[tuple[str, int, float]]:
    """OpenEnv's server in a process: its URL, id, and the milliseconds until it answered."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    path = os.pathsep.join([str(ROOT / "packages/envmanager/src"), str(ROOT), str(HERE.parent)])
    command = [str(peers.environment("openenv")), "-P", "-m", "tests.envmanager.openenv_server", target, str(port)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, str(COUNT + 1)], env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    )
    try:
        while not healthy(url):
            assert process.poll() is None, "OpenEnv's server ended"
            time.sleep(0.02)
        yield url, process.pid, (time.perf_counter() - began) * 1000
    finally:
        process.kill()
        process.wait()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def client(url: str, count: int, turns: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(
        peers.run("openenv", HERE.with_name("_openenv_client.py"), url, str(count), str(turns))
    )
    return said


def openenv(url: str, pid: int) -> Measured:
    used = cpu_s([pid])
    said = client(url, COUNT, TURNS)
    server_cpu, steps = cpu_s([pid]) - used, COUNT * (TURNS - 1)
    return Measured(said["starts"], said["rate"], (server_cpu + said["cpu"]) / steps * 1e6)


def own_server(target: str) -> float:
    """Milliseconds until a server of its own has reset one environment."""
    with server(target) as (url, _, started):
        return started + float(client(url, 1, 2)["starts"][0])


def row(metric: str, unit: str, mine: list[float], theirs: list[float], peer: str, less_is_better: bool) -> Row:
    """Each round's ratio, of which the median counts."""
    ratios = sorted(b / a if less_is_better else a / b for a, b in zip(mine, theirs, strict=True))
    return {
        "metric": metric,
        "unit": unit,
        "ours": statistics.median(mine),
        "peer": peer,
        "peer_value": statistics.median(theirs),
        "published": None,
        "ratio": statistics.median(ratios),
        "spread": [ratios[0], ratios[-1]],
    }


def compared(name: str, target: str) -> list[Row]:
    with server(target) as (url, pid, _):
        pairs = [(asyncio.run(ours(target)), openenv(url, pid)) for _ in range(ROUNDS)]
    servers = [own_server(target) for _ in range(SERVERS)]
    p50 = [(statistics.median(mine.starts), statistics.median(theirs.starts)) for mine, theirs in pairs]
    mine_p50, theirs_p50 = [list(side) for side in zip(*p50, strict=True)]
    start = [statistics.median(mine_p50)] * SERVERS
    shared = "OpenEnv 0.10, sessions in one server"
    at = f"{name}, {COUNT} environments"
    mine, theirs = [list(side) for side in zip(*pairs, strict=True)]
    return [
        row(f"steps, {at}", "1/s", [m.rate for m in mine], [t.rate for t in theirs], shared, False),
        row(f"CPU, {at}", "us a step", [m.cpu_us for m in mine], [t.cpu_us for t in theirs], shared, True),
        row(f"start and reset p50, {at}", "ms", start, servers, "OpenEnv 0.10, a server for each", True),
        row(f"start and reset p50, {at}", "ms", mine_p50, theirs_p50, f"{shared} (not isolated)", True),
    ]


def main() -> None:
    sys.path.insert(0, str(HERE.parent))
    rows = [made for name, target in TARGETS.items() for made in compared(name, target)]
    command = f"python benchmarks/envmanager/{HERE.name}" + (" --quick" if QUICK else "")
    cpu = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    out = HERE.parents[1] / "results" / f"{HERE.stem}.json"
    result = {"name": HERE.stem, "command": command, "cpu": cpu, "rows": rows}
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    for made in rows:
        print(f"{made['metric']}: {made['ours']:.4g} {made['unit']} against {made['peer_value']:.4g}, {made['peer']}")


if __name__ == "__main__":
    main()
