"""Bringing up the parts of a run on this machine, and taking them down in reverse.

Metadata store, weight store and Ray come first, then generation and training side by side, because an engine takes
tens of seconds to start. Invariant: whatever fails on the way, what had been started is gone when the error arrives
(tests/integration/test_integration_manners.py).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from resmgr import Pool, Request, ResourceManager
from rollart.config import Config
from rollart.distributed import ActorOptions, Cluster, RaySession
from rollart.distributed.generation import GenerationHost, engine_environment
from rollart.distributed.placement import with_gpus
from rollart.distributed.ray_worker import ray_workers
from rollart.plan import requests
from rollart.roles.actor_gen import EngineSettings, make_engine
from rollart.roles.actor_train import ActorTrain
from rollart.roles.train_client import TrainClient
from rollart.runtime.cpu import CpuClock
from rollart.runtime.folder import RunFolder
from rollart.runtime.parts import Parts
from rollart.runtime.setting import Setting
from rollart.runtime.store import folders_of, weight_stores

MIB = 1 << 20
# Heartbeats run on the driver's loop, which imports of large libraries hold up for seconds.
_LEASE_S = 30.0


@asynccontextmanager
async def launch(
    config: Config, folder: RunFolder, setting: Setting, checkpoint: Path | None, tell: Callable[[str], None]
) -> AsyncIterator[Parts]:
    """The parts of a run, up and connected. `tell` hears what is being waited for."""
    async with AsyncExitStack() as stack:
        resources = await stack.enter_async_context(
            await ResourceManager.connect(f"embedded:{folder.path / 'metadata'}", ttl=_LEASE_S)
        )
        for pool in config.pools:
            # The store is the run's own: what it remembers of an earlier start is no other's.
            await resources.register(Pool(pool.name, pool.hardware, pool.total), replace=True)
        stores = await stack.enter_async_context(weight_stores(config.weights, config.train.processes))
        tell(f"weights go through {stores[0].partition(':')[0]}; starting Ray")
        await stack.enter_async_context(RaySession(owns=folders_of(stores)))
        for role in ("environment", "reward"):
            await resources.bind(_request(config, role), timeout=config.generation.start_timeout_s)
        tell(f"starting {config.generation.workers} vLLM engines and the trainer (most of a minute)")
        generation, training = _clusters(config, folder, setting, stores, checkpoint, resources)
        await _enter_both(stack, generation, training)
        workers = ray_workers(generation, patience_s=config.generation.start_timeout_s)
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.close)
        version = (await training.held_version()) if checkpoint is not None else 0
        trainer = TrainClient(training, setting.allowed, version, config.train.advantage)
        yield Parts(
            workers=workers,
            trainer=trainer,
            watch=partial(_watch, [generation, training]),
            export=trainer.export,
            cpu=CpuClock({"engines": partial(_pids, generation), "trainer": partial(_pids, training)}),
        )


def _pids(cluster: Cluster) -> list[int]:
    return [member.pid for member in cluster.members]


def _clusters(
    config: Config,
    folder: RunFolder,
    setting: Setting,
    stores: tuple[str, ...],
    checkpoint: Path | None,
    resources: ResourceManager,
) -> tuple[Cluster, Cluster]:
    """The generation and the training cluster, not yet started."""
    generation, weights = config.generation, config.weights
    options = ActorOptions(env=engine_environment(), logs=folder.logs, start_timeout=generation.start_timeout_s)
    serving, learning = msgspec.structs.replace(options, restarts=generation.restarts), options
    if generation.gpus:
        serving = msgspec.structs.replace(
            serving, env=engine_environment(gpus=True), place=with_gpus(generation.gpus)
        )
    if config.train.device == "cuda":
        learning = msgspec.structs.replace(
            options, env=engine_environment(gpus=True), place=with_gpus(config.train.gpus)
        )
    settings = EngineSettings(
        model=str(setting.model),
        stores=stores,
        seed=config.run.seed,
        dtype=config.train.dtype,
        max_model_len=generation.max_model_len,
        max_num_seqs=generation.max_num_seqs,
        kv_cache_mb=generation.kv_cache_mb,
        timeout_s=weights.timeout_s,
        gpus=generation.gpus,
    )
    engines = Cluster(
        GenerationHost,
        resources,
        generation.workers,
        "gen",
        request=[_request(config, f"gen-{rank}") for rank in range(generation.workers)],
        backend="vllm",
        options=serving,
        make=partial(make_engine, settings),
    )
    ranks = config.train.processes
    trainer = Cluster(
        ActorTrain,
        resources,
        ranks,
        "train",
        request=[_request(config, f"train-{rank}") for rank in range(ranks)],
        backend=config.train.backend,
        options=learning,
        model=str(setting.model),
        trainer=config.trainer,
        stores=stores,
        bucket_bytes=int(weights.bucket_mb * MIB),
        keep=weights.keep_versions,
        restore=str(checkpoint) if checkpoint else None,
        address=f"127.0.0.1:{_free_port()}",
    )
    return engines, trainer


def _request(config: Config, role: str) -> Request:
    classes, amount = requests(config)[role]
    return Request(role=role, prefer=classes[:1], fallback=classes[1:], amount=amount, gang=True)


async def _enter_both(stack: AsyncExitStack, *clusters: Cluster) -> None:
    """Start the clusters side by side; a failure of one stops the others before it is raised."""
    starts = [asyncio.create_task(cluster.start()) for cluster in clusters]
    try:
        await asyncio.gather(*starts)
    except BaseException:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        for cluster in clusters:
            await cluster.stop()
        raise
    for cluster in clusters:
        stack.push_async_callback(cluster.stop)


async def _watch(clusters: Sequence[Cluster]) -> None:
    """Waits for the first worker that is dead for good, and raises its death."""
    done, _ = await asyncio.wait([cluster.died for cluster in clusters], return_when=asyncio.FIRST_COMPLETED)
    raise next(iter(done)).result()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
