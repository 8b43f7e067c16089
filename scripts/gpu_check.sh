#!/usr/bin/env bash
# Check training and decoding on one GPU, in under six minutes, nothing installed or downloaded.
#   scripts/gpu_check.sh [--device cpu --tiny] [--parts train attention decode]     (--help)
# Needs torch, transformers and accelerate. Elsewhere: PYTHON names the interpreter that has them.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$root" "$site/headstart"  # the package is this folder, whatever its name
PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 \
    "${PYTHON:-python3}" -m headstart.train.gpu_check "$@"
