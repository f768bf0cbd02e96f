"""What the README and the example show runs."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import samplebuffer

ROOT = Path(__file__).parents[2]


def test_the_readmes_example_runs(capsys) -> None:
    text = (ROOT / "packages/samplebuffer/README.md").read_text()
    first = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    exec(compile(first, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("32 samples") == 3


async def test_the_example_learns() -> None:
    space: dict[str, Any] = {"__name__": "example"}
    random.seed(1)
    exec(compile((ROOT / "examples/samplebuffer_in_a_plain_loop.py").read_text(), "example", "exec"), space)
    assert await space["main"]() > 0.8


def test_all_is_what_is_exported_and_needs_msgspec_alone() -> None:
    assert all(hasattr(samplebuffer, name) for name in samplebuffer.__all__)
    script = "import sys, samplebuffer; print(sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    loaded = set(re.findall(r"'(\w+)'", out)) - set(sys.stdlib_module_names)
    assert not loaded & {"ray", "torch", "numpy", "vllm", "llmproxy", "envmanager", "weightsync", "resmgr", "rollart"}
    assert {"samplebuffer", "msgspec"} <= loaded
