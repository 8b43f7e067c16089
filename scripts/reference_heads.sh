#!/usr/bin/env bash
# Rebuild the reference heads from nothing: rows, features, one head a family, and one table.
# Run it again after an interruption: what is finished is kept.
#   scripts/reference_heads.sh [DIRECTORY]
set -euo pipefail
out=${1:-runs/reference}
heads=$out/heads

headstart generate data.num_prompts=2000 generate.batch_size=64 out="$out/rows"
headstart generate data.num_prompts=32 data.split=heldout generate.batch_size=64 out="$out/heldout"
headstart capture rows="$out/rows" 'aux=[2,15,27]' out="$out/features"

for head in medusa hydra_heads eagle eagle3 eagle31; do
    [ -e "$heads/$head.done" ] && continue
    rm -rf "${heads:?}/$head" # an interrupted training starts again
    headstart train -m experiment=compare "head=$head" \
        "rows=$out/rows" "heldout_rows=$out/heldout" "features=$out/features" "out=$heads"
    touch "$heads/$head.done"
done

measure() { # TREE HEAD...: decode the same held-out prompts with each head
    local tree=$1 && shift
    local given=("${@/#/$heads/}")
    local checkpoints && checkpoints=$(printf ',%s/head' "${given[@]}")
    [ -e "$out/eval/$tree/report.md" ] && return
    headstart eval "tree=$tree" "checkpoints=[${checkpoints:1}]" eval.num_prompts=21 "out=$out/eval/$tree"
}
measure chain3 medusa hydra_heads eagle eagle3 eagle31
measure static15 medusa hydra_heads eagle eagle3 eagle31
measure dynamic16 hydra_heads eagle eagle3 eagle31
measure dynamic60 eagle eagle3 eagle31 # six deep: hydra_heads has four heads
headstart report "results=[$out/eval]" "out=$out/report"
