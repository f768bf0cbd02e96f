"""A broadcast over gloo between two processes brings every byte."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from weightsync import MemoryStore, Publisher, Subscriber

# Two processes import torch: seconds on a quiet machine, minutes on a crowded one.
pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

RANK = """
import asyncio, sys
import torch
import torch.distributed as dist
from weightsync.checksum import checksum
from weightsync.group import GroupSync

rank, port, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
device = "cpu"
if backend == "nccl":
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
generator = torch.Generator().manual_seed(0)
shared = torch.randint(0, 256, (40,), generator=generator, dtype=torch.uint8)
weights = {
    "big": torch.randn(37, 11, generator=generator, dtype=torch.float32).t(),
    "half": torch.randn(64, generator=generator).bfloat16(),
    "a": shared, "tied": shared, "empty": torch.zeros(0, 3), "scalar": torch.tensor(-0.0),
}

weights = {name: tensor.to(device) for name, tensor in weights.items()}
weights["tied"] = weights["a"]

async def main():
    sync = GroupSync(bucket_bytes=128, device=device)
    for version in range(2):
        weights["half"][version] = float("nan")
        if rank == 0:
            digest = (await sync.publish(version, weights)).digest
        else:
            found = {}
            report = await sync.receive(lambda name, tensor: found.update({name: tensor.clone()}))
            digest = report.digest
            assert report.version == version and found.keys() == weights.keys()
            for name, tensor in weights.items():
                raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, found[name])]
                assert found[name].shape == tensor.shape and torch.equal(*raw), name
        print(digest, flush=True)

asyncio.run(main())
dist.destroy_process_group()
"""


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


async def test_every_byte_arrives_by_broadcast() -> None:
    await check("gloo")


async def test_every_byte_arrives_between_gpus() -> None:
    if gpus() < 2:
        pytest.skip(f"NCCL needs a GPU for each of the two ranks; this machine has {gpus()}")
    await check("nccl")


async def check(backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", RANK, str(rank), port, backend, stdout=asyncio.subprocess.PIPE
        )
        for rank in range(2)
    ]
    outputs = [(await rank.communicate())[0].decode().split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0] == outputs[1] and len(set(outputs[0])) == 2


async def test_a_published_version_goes_from_one_gpu_to_a_module_on_it(memory: MemoryStore) -> None:
    """Device tensors are copied to the host bucket by bucket, and back."""
    import torch

    from weightsync.torch import load_into, named_tensors

    if not gpus():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    source, target = (torch.nn.Linear(300, 70).to("cuda", torch.bfloat16) for _ in range(2))
    publisher, subscriber = Publisher(memory, bucket_bytes=4096, encoding="delta"), Subscriber(memory)
    for version in range(2):
        with torch.no_grad():
            source.weight.t()[version] = float("nan")
        manifest = await publisher.publish(version, {**named_tensors(source)})
        report = await subscriber.commit(await subscriber.prefetch(version), load_into(target))
        assert report.digest == manifest.digest
        for name, tensor in source.state_dict().items():
            assert torch.equal(tensor.view(torch.int16), target.state_dict()[name].view(torch.int16)), name
    await subscriber.close()
