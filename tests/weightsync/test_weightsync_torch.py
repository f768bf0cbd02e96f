"""Modules at both ends."""

from __future__ import annotations

import pytest
import torch

from weightsync import BadTensor, MemoryStore, Publisher, Subscriber
from weightsync.torch import load_into, named_tensors


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(4)


async def test_a_module_loads_what_another_published(memory: MemoryStore) -> None:
    source, target = Tied(), Tied()
    manifest = await Publisher(memory).publish(0, named_tensors(source))
    assert [meta.tied_to for meta in manifest.tensors if meta.name == "head.weight"] == ["embed.weight"]
    subscriber = Subscriber(memory)
    report = await subscriber.commit(await subscriber.prefetch(0), load_into(target))
    assert report.digest == manifest.digest
    for (name, ours), theirs in zip(target.state_dict().items(), source.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert target.head.weight is target.embed.weight
    await subscriber.close()


async def test_ties_of_either_side_may_be_missing_on_the_other(memory: MemoryStore) -> None:
    source, target = Tied(), Tied()
    target.head.weight = torch.nn.Parameter(torch.zeros(7, 4))
    await Publisher(memory).publish(0, named_tensors(source))
    subscriber = Subscriber(memory)
    await subscriber.commit(await subscriber.prefetch(0), load_into(target))
    for weight in (target.head.weight, target.embed.weight):
        assert torch.equal(weight, source.head.weight)
    await subscriber.close()


async def test_name_maps_go_both_ways(memory: MemoryStore) -> None:
    source, target = torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(3, 2))
    await Publisher(memory).publish(0, named_tensors(source, rename=lambda name: f"hub.{name}"))
    subscriber = Subscriber(memory)
    staged = await subscriber.prefetch(0)
    await subscriber.commit(staged, load_into(target, rename=lambda name: name.replace("0.", "hub.")))
    assert torch.equal(target[0].weight, source.weight) and torch.equal(target[0].bias, source.bias)
    with pytest.raises(BadTensor, match=r"'0.bias'; nothing was loaded"):
        await subscriber.commit(staged, load_into(target))
    smaller = torch.nn.Linear(3, 2, bias=False)
    with pytest.raises(BadTensor, match=r"no tensor 'hub.bias'"):
        await subscriber.commit(staged, load_into(smaller, rename=lambda name: f"hub.{name}"))
    with pytest.raises(BadTensor, match="'one' to two tensors"):
        named_tensors(source, rename=lambda name: "one")
    await subscriber.close()


async def test_another_shape_or_dtype_is_named(memory: MemoryStore) -> None:
    await Publisher(memory).publish(0, named_tensors(torch.nn.Linear(3, 2)))
    subscriber = Subscriber(memory)
    staged = await subscriber.prefetch(0)
    for module in (torch.nn.Linear(3, 4), torch.nn.Linear(3, 2).half()):
        with pytest.raises(BadTensor, match=r"'weight' is float32\[2, 3\], the module has .*; nothing was loaded"):
            await subscriber.commit(staged, load_into(module))
    await subscriber.close()
