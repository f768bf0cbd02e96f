"""A Megatron-Core GPTModel of a Hugging Face Qwen3 or Llama folder: this rank's share of it, with its weights.

On GPUs with Transformer Engine the layers are its; without, they are Megatron's own in plain torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rollart.errors import ConfigError
from rollart.trainers.config import TrainerConfig
from rollart.trainers.megatron_names import Place, cut_dimension, from_hf
from rollart.trainers.model_folder import ModelFolder


def build(folder: ModelFolder, config: TrainerConfig, device: torch.device) -> tuple[Any, Place]:
    """The model of this rank and its place. Model parallelism must be initialized.

    Raises ConfigError for a model that Megatron would compute differently.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    check_supported(folder)
    facts = folder.config
    fused = config.device == "cuda" and find_spec("transformer_engine") is not None
    theta, scaling = _rope(facts)
    model = GPTModel(
        config=_transformer_config(facts, config, fused=fused),
        transformer_layer_spec=_layer_spec(qk_norm=facts["model_type"] == "qwen3", fused=fused),
        vocab_size=facts["vocab_size"],
        max_sequence_length=facts["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=_tied(facts),
        position_embedding_type="rope",
        rotary_base=theta,
        rope_scaling=scaling is not None,
        rope_scaling_factor=1.0 if scaling is None else scaling,
    )
    layers = facts["num_hidden_layers"] // config.pipeline_parallel
    place = Place(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_parallel=config.tensor_parallel,
        first_layer=parallel_state.get_pipeline_model_parallel_rank() * layers,
        kv_groups=folder.shape.num_key_value_heads,
        head_dim=_head_dim(facts),
        tied=_tied(facts),
    )
    dtype = getattr(torch, config.dtype)
    model = model.to(device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(from_hf(name, folder.tensor, place))
            _mark(parameter, cut_dimension(name, place))
    if model.post_process:
        # The output layer is applied by `token_logprobs`, to the tokens that train alone and piece by piece.
        model.output_layer.forward = lambda hidden, **_: (hidden, None)
    return model, place


def _mark(parameter: Any, dim: int | None) -> None:
    """Says which parameters are cut, by which the norm of the gradient is taken; Megatron's initialization would."""
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    if not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, dim is not None, -1 if dim is None else dim, 1)


def output_weight(model: Any) -> Tensor:
    """This rank's rows of the output layer, on the last stage."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def check_supported(folder: ModelFolder) -> None:
    """Raise ConfigError for what this module does not map: biases, sliding windows, other activations or RoPEs."""
    facts = folder.config
    expected = {
        "model_type": ("qwen3", "llama"),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
        "hidden_act": ("silu",),
    }
    for key, values in expected.items():
        if facts.get(key) not in values:
            reason = f"its config.json has {key} = {facts.get(key)!r}, which train.backend megatron does not take"
            raise ConfigError("model.path", str(folder.path), f"{reason}; torch works")
    _rope(facts)


def _transformer_config(facts: dict[str, Any], config: TrainerConfig, *, fused: bool) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    dtype = getattr(torch, config.dtype)
    options: dict[str, Any] = {}
    if config.checkpoint_activations:
        options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=facts["num_hidden_layers"],
        hidden_size=facts["hidden_size"],
        num_attention_heads=facts["num_attention_heads"],
        num_query_groups=facts.get("num_key_value_heads", facts["num_attention_heads"]),
        kv_channels=_head_dim(facts),
        ffn_hidden_size=facts["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=facts["rms_norm_eps"],
        qk_layernorm=facts["model_type"] == "qwen3",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=config.dtype == "bfloat16",
        use_cpu_initialization=True,
        perform_initialization=False,
        # Micro-batches are as long as their longest row.
        variable_seq_lengths=config.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",  # asked for beside varying lengths, though there are no experts
        deallocate_pipeline_outputs=False,
        batch_p2p_comm=config.device == "cuda",
        attention_backend=AttnBackend.auto if fused else AttnBackend.unfused,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        masked_softmax_fusion=fused,
        persist_layer_norm=fused,
        gradient_accumulation_fusion=False,  # needs apex
        **options,
    )


def _layer_spec(*, qk_norm: bool, fused: bool) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    if fused:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    return gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")


def _head_dim(facts: dict[str, Any]) -> int:
    return facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]


def _tied(facts: dict[str, Any]) -> bool:
    return bool(facts.get("tie_word_embeddings"))


# What Megatron's own scaling of Llama 3 has built in.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _rope(facts: dict[str, Any]) -> tuple[float, float | None]:
    """The base of the rotary embedding, and the factor of Llama 3's scaling, or None. Raises ConfigError."""
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or facts.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return theta, None
    if kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3.items()):
        return theta, rope["factor"]
    raise ConfigError("model.path", kind, "its rope_type is not one that train.backend megatron takes; torch works")
