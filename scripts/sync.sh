#!/bin/sh
# Makes .venv from uv.lock. The committed lock holds no address, so uv resolves it again and rewrites it; the copy is
# put back, so that the working tree stays as it was. Where a CPU build of torch lies in PIP_FIND_LINKS it is taken.
# Environments whose packages are compiled here come along where there is a compiler; their tests skip without them.
set -eu

cd "$(dirname "$0")/.."
cp uv.lock .tools/uv.lock
trap 'cp .tools/uv.lock uv.lock' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
[ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"
extras="--extra ${EXTRA:-cpu} --extra kubernetes --extra textarena --extra nixl --extra wandb"
if command -v cc >/dev/null; then extras="$extras --extra reasoning-gym --extra textworld"; fi
[ -e .venv/.extra ] || echo "sync: making .venv (some 4 GB, minutes)" >&2
# Engines import large libraries in several processes: with bytecode at hand each start is half as long.
# shellcheck disable=SC2086
UV_COMPILE_BYTECODE=1 .tools/uv/bin/uv sync --quiet ${UV_FIND_LINKS:+-P torch} --all-packages $extras
printf '%s' "${EXTRA:-cpu}" > .venv/.extra
