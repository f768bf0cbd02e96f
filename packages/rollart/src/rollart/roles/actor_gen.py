"""The generation role: a vLLM engine that pulls its weights from the store of the run, in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


async def make_engine(settings: EngineSettings, info: WorkerInfo) -> VLLMWorker:
    """Start the engine of worker `info`; it holds version 0, the model folder's weights."""
    from llmproxy.vllm import VLLMWorker
    from weightsync import ShardedSubscriber, open_store
    from weightsync.vllm import VLLMWeightLoader

    arguments = {
        "model": settings.model,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_memory_bytes": settings.kv_cache_mb << 20,
        "block_size": 32,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
    }
    stores = [open_store(url) for url in settings.stores]
    loader = VLLMWeightLoader(ShardedSubscriber(stores, {}, timeout=settings.timeout_s))
    worker = VLLMWorker(arguments, loader, info.name, info.hardware)
    await worker.start()
    return worker
