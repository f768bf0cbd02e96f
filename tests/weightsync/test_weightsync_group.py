"""A broadcast over gloo between two processes brings every byte."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

# Two processes import torch: seconds on a quiet machine, minutes on a crowded one.
pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

RANK = """
import asyncio, sys
import torch
import torch.distributed as dist
from weightsync.checksum import checksum
from weightsync.group import GroupSync

rank, port = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
generator = torch.Generator().manual_seed(0)
shared = torch.randint(0, 256, (40,), generator=generator, dtype=torch.uint8)
weights = {
    "big": torch.randn(37, 11, generator=generator, dtype=torch.float32).t(),
    "half": torch.randn(64, generator=generator).bfloat16(),
    "a": shared, "tied": shared, "empty": torch.zeros(0, 3), "scalar": torch.tensor(-0.0),
}

async def main():
    sync = GroupSync(bucket_bytes=128)
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


async def test_every_byte_arrives_by_broadcast() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", RANK, str(rank), port, stdout=asyncio.subprocess.PIPE
        )
        for rank in range(2)
    ]
    outputs = [(await rank.communicate())[0].decode().split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0] == outputs[1] and len(set(outputs[0])) == 2
