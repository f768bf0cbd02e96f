"""Megatron's parameters by their Hugging Face names, in both directions, for one rank's share of a model.

A parameter of Megatron holds one or several tensors of the Hugging Face model, or this rank's part of them: rows of
column-parallel layers and of the vocabulary, columns of row-parallel layers. Query, key and value are interleaved by
key-value group; gate and up stand one after the other. Every part is contiguous along one dimension of the Hugging
Face tensor, which is what lets ranks publish without gathering.

Invariants: taking apart what was put together gives back every bit, at any degree
(``tests/rollart/test_rollart_megatron_names.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from weightsync import Shard

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")

# Megatron's name: (Hugging Face's, the dimension that tensor parallelism cuts).
_TOP: Mapping[str, tuple[str, int | None]] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0),
    "output_layer.weight": ("lm_head.weight", 0),
    "decoder.final_layernorm.weight": ("model.norm.weight", None),
}
# Transformer Engine's layers hold the norm that comes before them.
_IN_LAYER: Mapping[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
}
_QKV = "self_attention.linear_qkv.weight"
_GATE_UP = "mlp.linear_fc1.weight"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which share of the model a rank holds."""

    tensor_rank: int
    tensor_parallel: int
    first_layer: int
    """Number of the stage's first layer in the whole model."""
    kv_groups: int
    """Key-value heads of the whole model."""
    head_dim: int
    tied: bool


class Part(NamedTuple):
    """A tensor of the Hugging Face model, or a part of it; `shard` is None where the tensor is whole."""

    name: str
    tensor: Tensor
    shard: Shard | None


def from_hf(name: str, whole: Callable[[str], Tensor], place: Place) -> Tensor:
    """The value of Megatron's parameter `name` on this rank; `whole` gives tensors by Hugging Face name.

    Raises KeyError for a parameter that a dense Qwen3 or Llama does not have.
    """
    prefix, inner = _split(name, place)

    def cut(source: str, dim: int | None) -> Tensor:
        tensor = whole(prefix + source)
        return tensor if dim is None else tensor.chunk(place.tensor_parallel, dim)[place.tensor_rank]

    if inner == _QKV:
        heads = [cut(f"self_attn.{kind}_proj.weight", 0) for kind in "qkv"]
        groups = place.kv_groups // place.tensor_parallel
        width = heads[0].shape[1]
        return torch.cat([part.reshape(groups, -1, place.head_dim, width) for part in heads], 1).reshape(-1, width)
    if inner == _GATE_UP:
        return torch.cat([cut("mlp.gate_proj.weight", 0), cut("mlp.up_proj.weight", 0)])
    if name == "output_layer.weight" and place.tied:
        return cut("model.embed_tokens.weight", 0)
    return cut(*(_IN_LAYER if prefix else _TOP)[inner])


def to_hf(name: str, tensor: Tensor, place: Place) -> list[Part]:
    """What Megatron's parameter `name` holds. Views where the layout allows it; nothing for a tied output layer."""
    prefix, inner = _split(name, place)

    def part(target: str, value: Tensor, dim: int | None) -> Part:
        if dim is None or place.tensor_parallel == 1:
            return Part(prefix + target, value, None)
        size = value.shape[dim]
        shard = Shard(dim, place.tensor_rank * size, place.tensor_parallel * size)
        return Part(prefix + target, value, shard)

    if inner == _QKV:
        groups = tensor.view(place.kv_groups // place.tensor_parallel, -1, place.head_dim, tensor.shape[-1])
        kinds = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
        return [
            part(f"self_attn.{kind}_proj.weight", rows.reshape(-1, tensor.shape[-1]), 0)
            for kind, rows in kinds.items()
        ]
    if inner == _GATE_UP:
        return [
            part(f"mlp.{kind}_proj.weight", rows, 0)
            for kind, rows in zip(("gate", "up"), tensor.chunk(2), strict=True)
        ]
    if name == "output_layer.weight" and place.tied:
        return []
    target, dim = (_IN_LAYER if prefix else _TOP)[inner]
    return [part(target, tensor, dim)]


def cut_dimension(name: str, place: Place) -> int | None:
    """The dimension along which tensor parallelism cuts a parameter; None for one that every rank has whole."""
    prefix, inner = _split(name, place)
    return 0 if inner in (_QKV, _GATE_UP) else (_IN_LAYER if prefix else _TOP)[inner][1]


def _split(name: str, place: Place) -> tuple[str, str]:
    """The Hugging Face prefix of a layer's parameter (empty outside of layers), and its name within the layer."""
    found = _LAYER.match(name)
    if found is None:
        return "", name
    return f"model.layers.{int(found[1]) + place.first_layer}.", found[2]
