#!/usr/bin/env bash
# The leaderboard: every head of a directory and the drafters without one, with every kind of tree,
# on MT-bench, GSM8K, HumanEval and generated held-out prompts; then report.md over all of it.
# Run it again after an interruption: what is measured is kept, and each command goes on from there.
#   scripts/leaderboard.sh [OUT] [HEADS] [PROMPTS] [OPTION=VALUE...]
# HEADS holds NAME/head directories, PROMPTS mt_bench.jsonl, gsm8k.jsonl and humaneval.jsonl; every
# evaluation gets the options, such as eval.num_prompts=1 to try it out.
# ROWS=DIRECTORY names the heads' training rows, in which the prompts are then looked for.
# PARTS="search t0" runs only these parts.
set -euo pipefail
out=$(realpath -m "${1:-runs/leaderboard}")
heads=${2:-runs/reference/heads}
prompts=${3:-../shared/data}
rows=${ROWS:-}
options=("${@:4}")
parts=${PARTS:-search t0 t1 best equality report}

refuse() { # MESSAGE: before hours are spent
    echo "$1" >&2
    exit 2
}
for part in $parts; do
    [[ " search t0 t1 best equality report " == *" $part "* ]] ||
        refuse "PARTS=$part: expected some of search t0 t1 best equality report"
done
compgen -G "$heads/*/head" >/dev/null ||
    refuse "HEADS=$heads: no NAME/head there; give a directory of trained heads"
for suite in mt_bench gsm8k humaneval; do
    [[ -e $prompts/$suite.jsonl ]] ||
        refuse "PROMPTS=$prompts: no $suite.jsonl there; give the directory that holds it"
done
cat <<TEXT
Measured in turn, each with one interleaved plain arm, into $out; about three hours on two CPU cores
with four reference heads (four suites of 20 first turns, 64 tokens each):
  search    the fastest tree of every head, on other prompts                          30 minutes
  t0        every head and drafter with every tree, greedy                            55 minutes
  t1        chains, a top-k tree and a drawn one at temperature 1                     40 minutes
  best      the three fastest of t0, three repeats                                    30 minutes
  equality  as t0, in fp32, ten prompts a suite in batches of ten: all must be equal  15 minutes
Speedup by batch size is not measured: for all of them it would take hours. That of the three
fastest is, once best is done (whose figures are kept), with
  PARTS="best report" scripts/leaderboard.sh OUT HEADS PROMPTS eval.batch_sizes=[1,2,4,8,16]
TEXT

names=() checkpoints="" folders=""
arms="*-chain3,*-static15,*-dynamic16"
trees=(+tree@trees.chain=chain3 +tree@trees.static=static15 +tree@trees.dynamic=dynamic16)
for directory in "$heads"/*/head; do
    name=$(basename "$(dirname "$directory")")
    names+=("$name")
    checkpoints+=,$directory
    folders+=,file://$out/search/$name
    trees+=("+tree@trees.$name=searched_$name")
    arms+=",*$name-searched_$name" # of the trees found, each head drafts its own
done
drawn=(+tree@trees.drawn=static15 trees.drawn.name=drawn15 trees.drawn.children=sampled)
suites="eval.suites=[{path:$prompts/mt_bench.jsonl},{path:$prompts/gsm8k.jsonl}"
suites+=",{path:$prompts/humaneval.jsonl},{name:heldout}]"

search() { # writes the option searched_NAME of the group tree to OUT/search/NAME/tree
    local name
    for name in "${names[@]}"; do
        [[ -e $out/search/$name/tree.json ]] && continue
        headstart tree "checkpoint=$heads/$name/head" "out=$out/search/$name" \
            "name=searched_$name" search.num_prompts=60 'search.top_k=[2,3,4]' search.max_nodes=24 \
            '~tree@presets.dynamic60' '~tree@presets.chain2' eval.seed=1 eval.num_prompts=30 \
            "${options[@]}"
    done
}

measure() { # PART OPTION...: all arms under the options of one part
    headstart eval "checkpoints=[${checkpoints:1}]" "$suites" eval.max_turns=1 "out=$out/$1" \
        eval.skip_misfits=true "eval.training_rows=[$rows]" "${@:2}" "${options[@]}"
}

greedy() { # PART OPTION...: the arms of t0
    local name
    for name in "${names[@]}"; do
        [[ -e $out/search/$name/tree/searched_$name.yaml ]] ||
            refuse "$1: no tree of $name in $out/search; find it first with PARTS=search"
    done
    measure "$1" "hydra.searchpath=[${folders:1}]" "${trees[@]}" \
        'drafter=[lookup,suffix_chain,suffix_tree]' "${@:2}"
}

fastest() { # names of the three fastest arms of t0, with commas
    python3 - "$out/t0" <<'PYTHON'
import glob, json, sys

SPEED = "speedup_ratio_of_sums_decode"
results = [json.load(open(path)) for path in glob.glob(f"{sys.argv[1]}/*/result.json")]
timed = [result for result in results if result["figures"][SPEED] is not None]
if not timed:
    sys.exit(f"best: no result with a speed in {sys.argv[1]}; measure first with PARTS=t0")
timed.sort(key=lambda result: -result["figures"][SPEED])
print(",".join(result["drafter"]["name"] for result in timed[:3]))
PYTHON
}

for part in $parts; do
    case $part in
        search) search ;;
        t0) greedy t0 "eval.only=[$arms,lookup,suffix_chain,suffix_tree]" ;;
        t1) measure t1 sampling.temperature=1 "${trees[@]:0:2}" "${drawn[@]}" drafter=[lookup] ;;
        best)
            only=$(fastest) # alone on its line, so that a failure ends the script
            greedy best "eval.only=[$only]" eval.repeats=3
            ;;
        equality)
            greedy equality "eval.only=[$arms,lookup,suffix_chain,suffix_tree]" \
                target.dtype=float32 eval.num_prompts=10 eval.batch_size=10
            ;;
        report) headstart report "results=[$out/best,$out/t0,$out/t1,$out/equality]" "out=$out/report" ;;
    esac
done
