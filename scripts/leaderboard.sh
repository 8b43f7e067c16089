#!/usr/bin/env bash
# The leaderboard: every head of a directory and the drafters without one, with every kind of tree,
# on MT-bench, GSM8K, HumanEval and generated held-out prompts; then report.md over all of it.
# Run it again after an interruption: what is measured is kept, and each command goes on from there.
#   scripts/leaderboard.sh [OUT] [HEADS] [PROMPTS] [OPTION=VALUE...]
# HEADS holds NAME/head directories, PROMPTS mt_bench.jsonl, gsm8k.jsonl and humaneval.jsonl; every
# evaluation gets the options, such as eval.num_prompts=1 to try it out.
# ROWS=DIRECTORY names the heads' training rows, in which the prompts are then looked for.
set -euo pipefail
out=${1:-runs/leaderboard}
heads=${2:-runs/reference/heads}
prompts=${3:-../shared/data}
rows=${ROWS:-}
options=("${@:4}")

checkpoints=$(printf ',%s' "$heads"/*/head)
given=("checkpoints=[${checkpoints:1}]" eval.skip_misfits=true "eval.training_rows=[$rows]")
suites="eval.suites=[{path:$prompts/mt_bench.jsonl},{path:$prompts/gsm8k.jsonl}"
suites+=",{path:$prompts/humaneval.jsonl},{name:heldout}]"
trees=(+tree@trees.chain=chain3 +tree@trees.static=static15 +tree@trees.dynamic=dynamic16)
without_head=('drafter=[lookup,suffix_chain,suffix_tree]')
cat <<TEXT
Measured in turn, each with one interleaved plain arm, into $out; about two and a half hours on two
CPU cores with the reference heads (four suites of 20 prompts, a hundred turns of 64 tokens an arm):
  t0        every head and drafter with every tree, greedy                            50 minutes
  t1        the same at temperature 1                                                 60 minutes
  best      the three fastest of t0, three repeats                                    30 minutes
  equality  as t0, in fp32, ten prompts a suite in batches of ten: all must be equal  15 minutes
TEXT

measure() { # NAME OPTION...: all arms under the options of one part
    local name=$1 && shift
    headstart eval "${given[@]}" "$suites" "${trees[@]}" "${without_head[@]}" "out=$out/$name" \
        "$@" "${options[@]}"
}
measure t0
measure t1 sampling.temperature=1

best=$(python3 - "$out"/t0/*/result.json <<'PYTHON'
import json, sys

results = [json.load(open(path)) for path in sys.argv[1:]]
results.sort(key=lambda result: -result["figures"]["speedup_ratio_of_sums_decode"])
print(",".join(result["drafter"]["name"] for result in results[:3]))
PYTHON
)
measure best "eval.only=[$best]" eval.repeats=3
measure equality target.dtype=float32 eval.num_prompts=10 eval.batch_size=10
headstart report "results=[$out/best,$out/t0,$out/t1,$out/equality]" "out=$out/report"
