#!/usr/bin/env bash
# Time an EAGLE-3 training step against that of the public package `speculators`, on the CPU.
# It gets an environment of its own, made once.
#   scripts/compare_speculators.sh [OPTIONS]      (--help lists them)
# Elsewhere: HEADSTART_PYTHON is the interpreter that has headstart, SPECULATORS_VENV a directory.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
ours=${HEADSTART_PYTHON:-$root/.venv/bin/python}
venv=${SPECULATORS_VENV:-$root/.cache/speculators}

if [ ! -e "$venv/installed" ]; then
    echo "installing speculators into $venv (once)"
    "${PYTHON:-python3}" -m venv "$venv"
    pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    echo torch==2.13.0 > "$venv/constraints.txt"
    # torch first and pinned, as in the Makefile, and the same for both.
    "${pip[@]}" torch==2.13.0
    "${pip[@]}" --constraint "$venv/constraints.txt" speculators==0.9.0
    # Built for CUDA, they do not load beside a torch for the CPU; nothing here needs them.
    "${pip[@]:0:3}" uninstall --quiet --yes torchvision torchaudio
    touch "$venv/installed"
fi
exec "$ours" "$root/scripts/compare_speculators.py" --theirs "$venv/bin/python" "$@"
