"""What of vLLM this package uses. Importing it imports vLLM, which takes many seconds; llmproxy.vllm does so late."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from .values import Sampling

__all__ = ["EngineDeadError", "VLLMValidationError", "make", "read", "salvage", "sampling_params", "tokens_input"]


def make(engine_args: dict[str, Any]) -> Any:
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))


def sampling_params(sampling: Sampling, max_tokens: int, seed: int | None) -> Any:
    """One answer at the end, with the log-probability of each drawn token. `skip_clone` makes it cheap to reuse."""
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
    )


def read(output: Any) -> tuple[list[int], list[float], list[tuple[str, int, int]], str, int]:
    """Tokens, log-probabilities, (version, start, end) runs, finish reason and cached prompt tokens of an output."""
    done = output.outputs[0]
    runs = [(run.version, run.start, run.end) for run in done.weight_versions or ()]
    return list(done.token_ids), done.logprobs.logprobs, runs, done.finish_reason, output.num_cached_tokens or 0


def salvage(engine: Any, collector: Any) -> Any:
    """The output of a dead engine's request as far as this process has received it, or None."""
    engine.output_processor.abort_requests((collector.request_id,), internal=True)
    return collector.get_nowait()
