"""What of vLLM this package uses. Importing it imports vLLM, which takes many seconds; llmproxy.vllm does so late."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from .values import Sampling

__all__ = [
    "EngineDeadError",
    "VLLMValidationError",
    "has_tokens",
    "make",
    "read",
    "read_handoff",
    "salvage",
    "sampling_params",
    "tokens_input",
    "tokens_left",
]


def make(engine_args: dict[str, Any]) -> Any:
    transfer = engine_args.get("kv_transfer_config")
    if isinstance(transfer, dict):
        engine_args = engine_args | {"kv_transfer_config": KVTransferConfig(**transfer)}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))


def sampling_params(
    sampling: Sampling, max_tokens: int, seed: int | None, transfer: dict[str, Any] | None = None
) -> Any:
    """One answer at the end, with the log-probability of each drawn token. `skip_clone` makes it cheap to reuse.

    `transfer` says what to do with the cache of the prompt: keep it for another engine, or take it from one.
    """
    allowed = sampling.allowed_token_ids
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        allowed_token_ids=None if allowed is None else list(allowed),
        max_tokens=max_tokens,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        extra_args=None if transfer is None else {"kv_transfer_params": transfer},
    )


def read(output: Any) -> tuple[list[int], list[float], list[tuple[str, int, int]], str, int]:
    """Tokens, log-probabilities, (version, start, end) runs, finish reason and cached prompt tokens of an output."""
    done = output.outputs[0]
    runs = [(run.version, run.start, run.end) for run in done.weight_versions or ()]
    return list(done.token_ids), done.logprobs.logprobs, runs, done.finish_reason, output.num_cached_tokens or 0


def read_handoff(output: Any) -> tuple[str, int, dict[str, Any] | None]:
    """Version of the weights, cached prompt tokens, and where the cache can be had; None when it was aborted."""
    runs = output.outputs[0].weight_versions
    return runs[-1].version if runs else "", output.num_cached_tokens or 0, output.kv_transfer_params


def salvage(engine: Any, collector: Any) -> Any:
    """The output of a dead engine's request as far as this process has received it, or None."""
    engine.output_processor.abort_requests((collector.request_id,), internal=True)
    return collector.get_nowait()


def has_tokens(engine: Any, collector: Any) -> bool:
    """Whether a first token of the request has arrived in this process."""
    state = engine.output_processor.request_states.get(collector.request_id)
    return state is not None and not state.is_prefilling


def tokens_left(engine: Any, collector: Any) -> int:
    """Tokens of the request that its engine may still compute, as far as this process knows."""
    state = engine.output_processor.request_states.get(collector.request_id)
    if state is None:
        return 0
    left = state.max_tokens_param - state.detokenizer.num_output_tokens()
    return left + state.prompt_len if state.is_prefilling else left
