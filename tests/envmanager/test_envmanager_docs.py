"""What the README and the examples show works."""

import re
import runpy
from pathlib import Path

import pytest
from aiohttp import web
from tests.envmanager.fakes import served

ROOT = Path(__file__).parents[2]


def test_readme(capsys):
    text = (ROOT / "packages/envmanager/README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("[4, 4, 4]\n")


@pytest.mark.seconds
async def test_evaluate_example(capsys):
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "right"}}]})

    example = runpy.run_path(str(ROOT / "examples/envmanager_evaluate.py"))
    async with served(handler) as url:
        await example["main"](url, "m")
    assert "256 episodes in" in capsys.readouterr().out
