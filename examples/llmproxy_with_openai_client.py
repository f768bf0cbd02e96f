"""A multi-turn loop with the official OpenAI client, and the record that a trainer needs of it.

    llmproxy serve --record --worker http://127.0.0.1:8101    # in front of a vLLM server
    python examples/llmproxy_with_openai_client.py --url http://127.0.0.1:8000

Without `--url` it starts a gateway of its own, over stand-ins that answer like vLLM and have no model. The loop knows
nothing of all that: it speaks to an OpenAI endpoint, with one header that names the trajectory.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.request import urlopen

from openai import AsyncOpenAI

from llmproxy import LLMProxy
from llmproxy.gateway import Gateway, GatewayConfig
from llmproxy.http_worker import HTTPWorker
from llmproxy.standin import StandIn


async def play(url: str, trajectory: str, turns: int) -> None:
    """An environment that says something back, and an agent that answers."""
    headers = {"x-trajectory-id": trajectory, "x-task": "chat"}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers) as client:
        model = (await client.models.list()).data[0].id
        messages: list[dict[str, str]] = [{"role": "user", "content": "You are in a maze. Which way?"}]
        for turn in range(turns):
            answer = await client.chat.completions.create(
                model=model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=12,
                temperature=1.0,
            )
            said = answer.choices[0].message.content or ""
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"A wall. Turn {turn + 1}?"},
            ]


def read(url: str) -> bytes:
    with urlopen(url) as response:
        return bytes(response.read())


async def main(url: str, trajectories: int = 3, turns: int = 3) -> None:
    names = [f"maze-{number}" for number in range(trajectories)]
    await asyncio.gather(*(play(url, name, turns) for name in names))
    for name in names:
        record = json.loads(await asyncio.to_thread(read, f"{url}/trajectories/{name}"))
        for request in record["requests"]:
            choice = request["choices"][0]
            print(
                f"{name} on {request['worker']}: {len(request['prompt_token_ids'])} prompt tokens, "
                f"{len(choice['token_ids'])} made by version {choice['spans'][0]['version']}, "
                f"log-probability {sum(choice['logprobs']):.2f}"
            )


@asynccontextmanager
async def own_gateway() -> AsyncIterator[str]:
    """A gateway over two stand-ins, all in this process."""
    servers = [StandIn(), StandIn()]
    workers = [HTTPWorker(f"http://127.0.0.1:{await server.start()}", id=f"w{n}") for n, server in enumerate(servers)]
    for worker in workers:
        await worker.start()
    proxy = LLMProxy(workers)
    gateway = Gateway(proxy, GatewayConfig(record=True))
    port = await gateway.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await gateway.close()
        await proxy.close()
        for worker in workers:
            await worker.close()
        for server in servers:
            await server.close()


async def run(url: str) -> None:
    if url:
        await main(url)
    else:
        async with own_gateway() as own:
            await main(own)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Play with an OpenAI client through a gateway.")
    options.add_argument("--url", default="", help="of a gateway that records, such as http://127.0.0.1:8000")
    asyncio.run(run(options.parse_args().url))
