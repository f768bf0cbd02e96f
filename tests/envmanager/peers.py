"""Environments of their own for libraries that cannot share ours: each pins versions that others exclude.

python tests/envmanager/peers.py gem|openenv|verifiers    makes one in build/envmanager/, and prints its Python
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "envmanager"
PACKAGES = {
    "gem": ["gem-llm==0.1.0"],
    "openenv": ["openenv==0.10.0", "gymnasium>=1.1"],
    "verifiers": ["verifiers==0.4.0"],
}
OURS = ["msgspec", "aiohttp"]


def environment(name: str) -> Path:
    """Its Python, made at the first need. Packages come from wherever pip takes them."""
    python = HOME / name / "bin" / "python"
    whole = HOME / name / ".whole"
    if not whole.exists():
        uv = shutil.which("uv") or shutil.which(str(ROOT / ".tools" / "uv" / "bin" / "uv"))
        environ = os.environ | (
            {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
        )
        shutil.rmtree(HOME / name, ignore_errors=True)
        if uv is not None:
            make = [uv, "venv", "-q", "--python", sys.executable, str(HOME / name)]
            install = [uv, "pip", "install", "-q", "--python", str(python)]
        else:
            make = [sys.executable, "-m", "venv", str(HOME / name)]
            install = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run(make, check=True, env=environ)
        subprocess.run([*install, *PACKAGES[name], *OURS], check=True, env=environ)
        whole.touch()
    return python


def run(name: str, script: Path, *arguments: str, seconds: float = 300.0) -> str:
    """What a script of ours says in that environment. Raises CalledProcessError with what went wrong."""
    path = os.pathsep.join([str(ROOT / "packages" / "envmanager" / "src"), str(ROOT)])
    environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [str(environment(name)), "-P", str(script), *arguments]
    return subprocess.run(command, check=True, env=environ, stdout=subprocess.PIPE, text=True, timeout=seconds).stdout


if __name__ == "__main__":
    print(environment(sys.argv[1]))
