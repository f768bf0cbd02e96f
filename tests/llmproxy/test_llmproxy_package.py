"""The package as others meet it: what it exports, what it does not load, and that its README runs."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llmproxy
from llmproxy import Partial, Span

PACKAGE = Path(llmproxy.__file__).parent
README = PACKAGE.parents[1] / "README.md"


def test_exports_are_what_is_imported() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imported = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == sorted(llmproxy.__all__)


def test_the_base_package_loads_no_engine() -> None:
    code = (
        "import sys, llmproxy, llmproxy.vllm; "
        "print([name for name in ('vllm', 'torch', 'ray', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_error_says_when_it_is_raised() -> None:
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name != "LLMProxyError":
            assert (ast.get_docstring(node) or "").startswith("Raised "), node.name


PARTIAL = Partial([4], [-0.5], [Span(0, 0, 1)], 3)


@pytest.mark.parametrize(
    "error",
    [
        llmproxy.InvalidRequest("max_tokens", "is 0", "at least 1"),
        llmproxy.DuplicateRequest("trajectory_id", "'t' is in flight", "one at a time"),
        llmproxy.WorkerLost("w", "died", PARTIAL),
        llmproxy.RetriesExhausted("r", 3, llmproxy.WorkerLost("w", "died")),
        llmproxy.Interrupted("r", PARTIAL),
        llmproxy.UpdateFailed(3, [llmproxy.Ack("w", 3, error="no")]),
        llmproxy.Aborted("r"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: llmproxy.LLMProxyError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error)
    assert getattr(copy, "partial", None) == getattr(error, "partial", None)


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
@pytest.mark.seconds
def test_the_readme_runs(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
