"""Inside a vLLM worker process: the weight-transfer engine "weightsync" and the extension that drives it.

vLLM imports this module because `VLLMWeightLoader.engine_args` names its `Extension`. Importing it registers the
engine, so `/start_weight_update`, `/update_weights` and `/finish_weight_update` work over HTTP too.

- Staged bytes are verified before anything is loaded: a refused update leaves the old weights in place and whole.
- If loading itself fails midway, weights are mixed: `broken` says so until a version has been loaded whole.
- The engine must be paused: between start and finish its layers have no storage
  (`test_weightsync_vllm.py`).
"""

from __future__ import annotations

import base64
import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from weightsync.assembly import assembled, combined, needed
from weightsync.errors import BadTensor, EngineRefused
from weightsync.handover import verify
from weightsync.manifest import Manifest, Plan
from weightsync.tensors import Bytes
from weightsync.torch import view

__all__ = ["BACKEND", "Extension", "StagedEngine"]

BACKEND = "weightsync"


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing to agree on: each update says where its bytes are."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """The staging files to map, one for each store, and the manifests (base64) of what is in them."""

    paths: list[str] = field(default_factory=list)
    manifests: list[str] = field(default_factory=list)


class StagedEngine(WeightTransferEngine[Init, Update]):
    """Loads versions from staging memory on this host."""

    init_info_cls = Init
    update_info_cls = Update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version: int | None = None
        self.digest = ""
        self.broken = ""
        self._updating = False
        self._mapped: dict[int, tuple[int, int, Bytes]] = {}

    def init_transfer_engine(self, init_info: Init) -> None:
        pass

    def start_weight_update(self) -> None:
        # An update whose driver died in the middle left layers without storage; loading over it would miscount.
        self._settle()
        self._updating = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would synchronize a device; what is loaded here is loaded when the call returns.
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._settle()
            raise

    def receive_weights(self, update_info: Update) -> None:
        manifests = [Manifest.decode(base64.b64decode(each)) for each in update_info.manifests]
        ranks = []
        for number, (manifest, path) in enumerate(zip(manifests, update_info.paths, strict=True)):
            plan = Plan(manifest.tensors, manifest.bucket_bytes)
            content = self._map(number, path, plan.total)
            verify(manifest, plan, content, needed(plan, {}, first=not number))
            ranks.append((plan, content))
        tensors = assembled(ranks, {})
        first = next(tensors, None)
        if first is None:
            raise BadTensor("the version has no tensors")
        version = manifests[0].version
        self.broken = f"loading version {version} has not finished"
        expected = {name for name, _ in self.model.named_parameters()}
        weights = ((tensor.meta.name, view(tensor)) for tensor in _chain(first, tensors))
        loaded = self.model.load_weights(weights)
        missing = sorted(expected - loaded) if loaded is not None and not self.model_config.quantization else []
        if missing:
            self.broken = f"version {version} brought nothing for {missing[0]!r} and {len(missing) - 1} more"
            raise EngineRefused(self.broken)
        self.version, self.digest = version, combined([manifest.digest for manifest in manifests])

    def finish_weight_update(self) -> None:
        self._updating = False
        finalize_layerwise_reload(self.model, self.model_config)
        self.broken = ""

    def shutdown(self) -> None:
        pass

    def _settle(self) -> None:
        """Give every layer its storage back; layers that nothing was loaded into get their old weights with it."""
        if self._updating:
            self._updating = False
            finalize_layerwise_reload(self.model, self.model_config)

    def _map(self, number: int, path: str, size: int) -> Bytes:
        """A staging file, mapped privately and kept, because mapping a large model anew costs its page faults."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if status.st_size < size:
                raise BadTensor(f"{path} holds {status.st_size} bytes, the manifest describes {size}")
            if self._mapped.get(number, (0, 0))[:2] != (status.st_ino, size):
                memory = mmap.mmap(fd, max(size, 1), access=mmap.ACCESS_COPY)
                self._mapped[number] = status.st_ino, size, np.frombuffer(memory, np.uint8, count=size)
        finally:
            os.close(fd)
        return self._mapped[number][2]


class Extension:
    """Calls for `collective_rpc`; vLLM mixes this class into its worker."""

    weight_transfer_engine: Any

    def weightsync_load(self, paths: list[str], manifests: list[str]) -> list[Any]:
        """One whole update in one call, so that no driver can leave it half done; returns `weightsync_state`."""
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights({"paths": paths, "manifests": manifests})
        worker.finish_weight_update()
        return self.weightsync_state()

    def weightsync_state(self) -> list[Any]:
        """`[version, digest, broken]` of what this worker's model holds."""
        engine = self.weight_transfer_engine
        return [engine.version, engine.digest, engine.broken]


def _chain(first: Any, rest: Any) -> Any:
    yield first
    yield from rest


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, StagedEngine)
