#!/usr/bin/env bash
# Run a command over several machines without a scheduler. Start it on each of them:
#   scripts/torchrun_nodes.sh MACHINES MACHINE ADDRESS_OF_MACHINE_0 PROCESSES train parallel=ddp ...
set -euo pipefail
machines=$1 machine=$2 address=$3 processes=$4
shift 4
exec torchrun --nnodes "$machines" --node-rank "$machine" --nproc-per-node "$processes" \
    --master-addr "$address" --master-port "${MASTER_PORT:-29500}" -m headstart "$@"
