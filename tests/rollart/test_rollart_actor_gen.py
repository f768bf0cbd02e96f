"""What an engine is made from, on the CPU and on GPUs."""

from __future__ import annotations

import pytest

from rollart.distributed import WorkerInfo
from rollart.distributed.generation import engine_environment
from rollart.distributed.placement import with_gpus
from rollart.roles.actor_gen import EngineSettings, engine_arguments


def settings(gpus: float, dtype: str = "bfloat16") -> EngineSettings:
    return EngineSettings(
        model="folder",
        stores=("shm:a",),
        seed=3,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_mb=64,
        timeout_s=60.0,
        gpus=gpus,
    )


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (0.0, {"enforce_eager": True, "block_size": 32, "distributed_executor_backend": "uni"}),
        (0.5, {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.45, "distributed_executor_backend": "uni"}),
        (1.0, {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "distributed_executor_backend": "uni"}),
        (4.0, {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.9, "distributed_executor_backend": "mp"}),
    ],
)
def test_the_device_decides_what_the_engine_is_made_from(gpus: float, expected: dict[str, object]) -> None:
    arguments = engine_arguments(settings(gpus))
    assert arguments.items() >= expected.items()
    assert arguments["dtype"] == "bfloat16" and arguments["kv_cache_memory_bytes"] == 64 << 20
    assert ("enforce_eager" in arguments) == (gpus == 0), "on GPUs the engine captures graphs"


def test_a_worker_sees_its_own_gpus_and_may_compile_for_them() -> None:
    info = WorkerInfo(name="gen-0", role="gen", rank=0, world_size=1, backend="vllm", hardware="H800", node="n")
    assert with_gpus(2.0)(info) == {"num_gpus": 2.0}
    assert "TORCH_COMPILE_DISABLE" in engine_environment()
    assert "TORCH_COMPILE_DISABLE" not in engine_environment(gpus=True)
