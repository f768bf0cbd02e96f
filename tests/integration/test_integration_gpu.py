"""A whole run on one GPU: the torch trainer and a vLLM engine share it, in bfloat16."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollart.observe.metrics import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CONFIG = """
run: {name: gpu, iterations: 3}
generation: {workers: 1, gpus: 0.5, kv_cache_mb: 256}
buffer: {batch_groups: 4, group_size: 4, drop_uniform: false}
rollout: {concurrency: 16}
train: {device: cuda, gpus: 0.5, dtype: bfloat16}
weights: {parity_limit: 0.2}
eval: {every: 100, episodes: 8}
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: CUDA engines and trainer in one run are not run")
def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "rollart.cli.main", "train", str(config), f"run.folder={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "gpu")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["parity/max_abs"] is not None
