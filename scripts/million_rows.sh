#!/usr/bin/env bash
# Prepare a made JSON Lines file of a million chats; minutes and peak memory end the log.
#   scripts/million_rows.sh [DIRECTORY] [ROWS]
set -euo pipefail
out=${1:-runs/million}
rows=${2:-1000000}

mkdir -p "$out"
python3 - "$out/chats.jsonl" "$rows" <<'EOF'
import json, random, sys

rng = random.Random(0)
words = "the a of to in is on with time water people house work light river small long green".split()

def text(most):
    return " ".join(rng.choices(words, k=rng.randint(3, most))) + f" {rng.randrange(10**6)}."

with open(sys.argv[1], "w") as file:
    for number in range(int(sys.argv[2])):
        turns = [("user", 40), ("assistant", 120)] * rng.choice((1, 1, 1, 2))
        messages = [{"role": role, "content": text(most)} for role, most in turns]
        row = {"id": f"chat-{number}", "messages": messages}
        file.write(("junk" if number % 1000 == 0 else json.dumps(row)) + "\n")
EOF
headstart prepare "data.path=$out/chats.jsonl" "out=$out/rows"
