"""Offers of device memory: layouts survive, ties are mapped once, another GPU is refused."""

from __future__ import annotations

import asyncio
import base64
import sys

import msgspec
import pytest
import torch

from weightsync import BadManifest, BadTensor, ipc

# A publisher with a tensor for each layout; it changes nothing until its input closes.
PUBLISHER = """
import base64, sys, torch
from weightsync import ipc
torch.manual_seed(0)
base = torch.randn(64, 32, device="cuda").to(torch.bfloat16)
scalar = torch.tensor(3.0, device="cuda")
tensors = {"whole": base, "strided": base.t(), "part": base[3:9], "tied": base, "scalar": scalar}
print(base64.b64encode(ipc.offer(7, tensors)).decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: CUDA IPC between two processes is not run")
async def test_a_process_loads_what_another_holds_on_the_gpu() -> None:
    publisher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PUBLISHER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert publisher.stdout is not None
    found: dict[str, torch.Tensor] = {}
    data = base64.b64decode(await publisher.stdout.readline())
    assert ipc.take(data, lambda name, tensor: found.update({name: tensor.clone()})) == 7
    await publisher.communicate()
    torch.manual_seed(0)
    base = torch.randn(64, 32, device="cuda").to(torch.bfloat16)
    expected = {"whole": base, "strided": base.t(), "part": base[3:9], "tied": base, "scalar": torch.tensor(3.0)}
    assert all(torch.equal(found[name].cpu(), tensor.cpu()) for name, tensor in expected.items())


class Memory:
    """Takes CUDA's place: storages of this process, by a number as their handle."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.opened: list[int] = []

    def shared(self, storage: torch.UntypedStorage) -> ipc.SharedStorage:
        self.storages.append(storage)
        return ipc.SharedStorage(bytes([len(self.storages) - 1]), storage.nbytes(), 0, b"c", 0, b"e", True)

    def open(self, shared: ipc.SharedStorage, index: int) -> torch.UntypedStorage:
        self.opened.append(shared.handle[0])
        return self.storages[shared.handle[0]]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(ipc, "_shared", memory.shared)
    monkeypatch.setattr(ipc, "_opened", memory.open)
    monkeypatch.setattr(ipc, "_uuid", lambda index: "GPU-1" if index == 1 else "GPU-0")
    monkeypatch.setattr(ipc, "_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(ipc, "_finish", lambda index: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return memory


def test_layouts_survive_and_ties_are_mapped_once(memory: Memory) -> None:
    base, other = torch.arange(24, dtype=torch.bfloat16).view(6, 4), torch.tensor(3.0)
    tensors = {"whole": base, "strided": base.t(), "part": base[2:5, 1:], "tied": base, "scalar": other}
    tensors["empty"] = torch.empty(0, 4)
    found: dict[str, torch.Tensor] = {}
    assert ipc.take(ipc.offer(7, tensors), lambda name, tensor: found.update({name: tensor}), device=0) == 7
    assert memory.opened == [0, 1]
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].stride() == tensor.stride()
        assert torch.equal(found[name], tensor), name


def test_another_gpu_is_refused_and_so_is_what_does_not_decode(memory: Memory) -> None:
    data = ipc.offer(7, {"w": torch.ones(2)})
    with pytest.raises(BadTensor, match="version 7 is on GPU GPU-0, this process is on GPU-1"):
        ipc.take(data, lambda name, tensor: None, device=1)
    for bad in (data[:-1], msgspec.msgpack.encode({"version": "x"})):
        with pytest.raises(BadManifest, match="does not decode"):
            ipc.take(bad, lambda name, tensor: None, device=0)


def test_host_tensors_are_refused() -> None:
    with pytest.raises(BadTensor, match="'w' is on cpu"):
        ipc.offer(1, {"w": torch.ones(2)})
