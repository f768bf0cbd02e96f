"""Megatron's names: what is put together from Hugging Face tensors comes apart again bit by bit, at any degree."""

from __future__ import annotations

import pytest
import torch

from rollart.trainers.megatron_names import Place, from_hf, to_hf

HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, VOCABULARY = 16, 8, 4, 6, 24, 32
LAYER = "model.layers.5."
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    LAYER + "input_layernorm.weight": (HIDDEN,),
    LAYER + "post_attention_layernorm.weight": (HIDDEN,),
    LAYER + "self_attn.q_norm.weight": (HEAD_DIM,),
    LAYER + "self_attn.k_norm.weight": (HEAD_DIM,),
    LAYER + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    LAYER + "self_attn.k_proj.weight": (GROUPS * HEAD_DIM, HIDDEN),
    LAYER + "self_attn.v_proj.weight": (GROUPS * HEAD_DIM, HIDDEN),
    LAYER + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    LAYER + "mlp.gate_proj.weight": (FFN, HIDDEN),
    LAYER + "mlp.up_proj.weight": (FFN, HIDDEN),
    LAYER + "mlp.down_proj.weight": (HIDDEN, FFN),
}
TOP = ["embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"]
COMMON = [
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
]
NORMS = {
    "local": ["input_layernorm.weight", "pre_mlp_layernorm.weight"],
    "transformer engine": ["self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"],
}


def place(rank, degree, *, tied=False):
    return Place(
        tensor_rank=rank, tensor_parallel=degree, first_layer=3, kv_groups=GROUPS, head_dim=HEAD_DIM, tied=tied
    )


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("layers", NORMS)
def test_round_trip_is_bit_exact(degree, layers):
    random = torch.Generator().manual_seed(0)
    model = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    model["model.norm.weight"][0] = -0.0
    names = TOP + [f"decoder.layers.2.{name}" for name in COMMON + NORMS[layers]]
    found = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    for rank in range(degree):
        for name in names:
            for part in to_hf(name, from_hf(name, model.__getitem__, place(rank, degree)), place(rank, degree)):
                shard = part.shard
                target = found[part.name]
                if shard is not None:
                    assert shard.size == target.shape[shard.dim]
                    target = target.narrow(shard.dim, shard.start, part.tensor.shape[shard.dim])
                target.copy_(part.tensor)
    for name, tensor in model.items():
        assert torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8)), name


def test_a_tied_output_layer_is_the_embedding():
    model = {"model.embed_tokens.weight": torch.arange(8.0).view(4, 2)}
    half = from_hf("output_layer.weight", model.__getitem__, place(1, 2, tied=True))
    assert half.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert to_hf("output_layer.weight", half, place(1, 2, tied=True)) == []


def test_unknown_parameters_are_refused():
    for name in ("decoder.layers.0.mlp.router.weight", "embedding.position_embeddings.weight"):
        with pytest.raises(KeyError):
            to_hf(name, torch.zeros(2, 2), place(0, 1))
