"""The generation role: a vLLM engine that pulls its weights from the store of the run, in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollart.distributed.worker import WorkerInfo

if TYPE_CHECKING:
    from llmproxy.vllm import VLLMWorker


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is made from."""

    model: str
    stores: tuple[str, ...]
    """One for each rank of the trainer, which publishes its own shards there."""
    seed: int
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_mb: int
    timeout_s: float
    gpus: float = 0.0
    """0 for the CPU; see `generation.gpus`."""


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """What vLLM makes the engine from, on the device that it is built for."""
    ranks = max(1, int(settings.gpus))
    device: dict[str, Any] = {"block_size": 32, "enforce_eager": True}
    if settings.gpus:
        # The cache's size is given; this is what else of the GPU is the engine's.
        device = {"tensor_parallel_size": ranks, "gpu_memory_utilization": 0.9 * min(1.0, settings.gpus)}
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_memory_bytes": settings.kv_cache_mb << 20,
        "enable_prefix_caching": True,
        "distributed_executor_backend": "uni" if ranks == 1 else "mp",
        **device,
    }


async def make_engine(settings: EngineSettings, info: WorkerInfo) -> VLLMWorker:
    """Start the engine of worker `info`; it holds version 0, the model folder's weights."""
    from llmproxy.vllm import VLLMWorker
    from weightsync import ShardedSubscriber, open_store
    from weightsync.vllm import VLLMWeightLoader

    stores = [open_store(url) for url in settings.stores]
    loader = VLLMWeightLoader(ShardedSubscriber(stores, {}, timeout=settings.timeout_s))
    worker = VLLMWorker(engine_arguments(settings), loader, info.name, info.hardware)
    await worker.start()
    return worker
