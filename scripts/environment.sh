#!/bin/sh
# Makes .venvs/NAME, a Python with the extra NAME of rollart-envmanager, for a library that pins what others exclude:
# gem, openenv or verifiers. A task's key `python` names it. Does nothing a second time.
set -eu

cd "$(dirname "$0")/.."
name="${1:?usage: scripts/environment.sh NAME, such as gem}"
home=".venvs/$name"
grep -q "^$name = \[" packages/envmanager/pyproject.toml || {
    echo "environment.sh: rollart-envmanager has no extra $name; gem, openenv and verifiers are such" >&2
    exit 1
}
[ ! -e "$home/.whole" ] || exit 0
[ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"
echo "making $home (minutes)"
.tools/uv/bin/uv venv --quiet --clear --python .venv/bin/python "$home"
.tools/uv/bin/uv pip install --quiet --python "$home/bin/python" --editable "packages/envmanager[$name]"
touch "$home/.whole"
