#!/bin/sh
# Brings what `make` needs on a bare Debian-like machine: uv under .tools/, and, as root with apt, the Debian packages
# named as arguments. Does nothing a second time. Says exactly what is missing when it cannot help.
set -eu

cd "$(dirname "$0")/.."
UV_VERSION=0.13.9
PYTHON="${PYTHON:-python3}"

say() { printf '%s\n' "setup: $*" >&2; }

apt_install() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return 1; fi
    say "installing Debian packages: $*"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return 0
    apt-get update -qq >/dev/null 2>&1 || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# pip may be absent from a bare Python: take the copy bundled with it, else Debian's.
pip_install_uv() {
    if "$PYTHON" -m pip --version >/dev/null 2>&1; then
        "$PYTHON" -m pip install -qq --target .tools/uv "uv==$UV_VERSION"
    elif "$PYTHON" -m venv .tools/pip >/dev/null 2>&1; then
        .tools/pip/bin/python -m pip install -qq --target .tools/uv "uv==$UV_VERSION"
    elif apt_install python3-pip; then
        "$PYTHON" -m pip install -qq --target .tools/uv "uv==$UV_VERSION"
    else
        say "missing: pip. Install the Debian package python3-pip, or uv $UV_VERSION or newer, and run make again."
        return 1
    fi
}

# An older one does not know the settings of pyproject.toml.
uv_at_hand() {
    found="$(uv --version 2>/dev/null | cut -d " " -f 2)"
    [ "$(printf "%s\n" "$UV_VERSION" "$found" | sort -V | head -n 1)" = "$UV_VERSION" ]
}

ensure_uv() {
    [ -x .tools/uv/bin/uv ] && return 0
    rm -rf .tools/uv
    if uv_at_hand; then
        mkdir -p .tools/uv/bin
        ln -sf "$(command -v uv)" .tools/uv/bin/uv
        return 0
    fi
    command -v "$PYTHON" >/dev/null || { say "missing: Python 3.11. Install the Debian package python3."; exit 1; }
    say "bringing uv $UV_VERSION into .tools/"
    pip_install_uv
}

# A package is asked for as NAME=FILE; FILE (a path, or a library the loader knows) tells that it is there already.
ensure_package() {
    name="${1%%=*}"
    probe="${1#*=}"
    case "$probe" in
        /*) [ -e "$probe" ] && return 0 ;;
        *) "$PYTHON" -c "import ctypes; ctypes.CDLL('$probe')" 2>/dev/null && return 0 ;;
    esac
    apt_install "$name" || say "missing: Debian package $name ($2). As root: apt-get install $name"
}

ensure_uv
ensure_package libibverbs1=libibverbs.so.1 "without it weights go through shared memory instead of Mooncake"
ensure_package bubblewrap=/usr/bin/bwrap "without it the tests of sandboxed environments are skipped, and swe: tasks refuse to run"
if [ "${1:-}" = --browser ]; then
    ensure_package chromium=/usr/bin/chromium "without it the tests that open the report are skipped"
fi
