"""A plain Hugging Face training loop that updates a running vLLM server after every step.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \\
        --worker-extension-cls=weightsync.vllm_engine.Extension '--weight-transfer-config={"backend": "weightsync"}'
    python examples/weightsync_transformers_to_vllm.py MODEL http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio

import torch
from transformers import AutoModelForCausalLM

from weightsync import MemoryStore, Publisher, Subscriber
from weightsync.torch import named_tensors
from weightsync.vllm import VLLMWeightLoader
from weightsync.vllm_http import HTTPEngine


async def main(model_path: str, url: str, steps: int = 3) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The trainer and the loader share this process; open_store("mooncake://...") would put a network between them.
    store = MemoryStore()
    publisher, loader = Publisher(store), VLLMWeightLoader(Subscriber(store))
    server = HTTPEngine(url)
    await loader.start(server)
    batch = torch.arange(10, 42).repeat(4, 1)
    for step in range(1, steps + 1):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        await publisher.publish(step, named_tensors(model))
        await loader.prefetch(step)  # the server goes on generating
        async with server.paused():
            digest = await loader.load(server, step)
        print(f"step {step}: loss {loss.item():.4f}, the server holds {digest}")
    await loader.close()


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("model", help="the folder that the server was started with")
    words.add_argument("url", help="of the server")
    arguments = words.parse_args()
    asyncio.run(main(arguments.model, arguments.url))
