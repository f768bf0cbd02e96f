"""OpenEnv's server and client with one of our environments between, played for real. Run in an environment that has
openenv.
"""

import asyncio
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from envmanager import DataError, EnvManager, InfrastructureError, Limits
from envmanager.check import check
from envmanager.naming import named
from envmanager.policies import RandomPolicy

LAKE = "gymnasium:FrozenLake-v1?is_slippery=false"


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


@asynccontextmanager
async def server(env: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-P", "-m", "tests.envmanager.openenv_server", env, str(port)]
    process = await asyncio.create_subprocess_exec(*command)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(healthy, url):  # noqa: ASYNC110 - another process gives no event
                await asyncio.sleep(0.1)
        yield url, process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def main() -> None:
    async with server(LAKE) as (url, process):
        make_env = named(f"openenv:{url}?observation=text&task=lake")
        played = await EnvManager(make_env, RandomPolicy(1)).run("k", 5)
        assert played.task == "lake" and "Walk from S to G" in played.turns[0].observation
        assert played.outcome.kind == "terminated"
        findings = await check(make_env)
        assert all(finding.holds for finding in findings if finding.rule != "loop"), findings
        whole = await EnvManager(named(f"openenv:{url}"), RandomPolicy(1), limits=Limits(max_turns=1)).run("k", 5)
        assert '"text":' in whole.turns[0].observation
        refused = named(f"openenv:{url}?action=nothing")
        await raises(DataError, refused)
        env = make_env("k")
        await env.reset(seed=0)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await raises(InfrastructureError, make_env)
    print("played through OpenEnv's server and client")


async def raises(kind: type[Exception], make_env: object) -> None:
    try:
        await EnvManager(make_env, RandomPolicy(1)).run("k", 0)  # type: ignore[arg-type]
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    asyncio.run(main())
