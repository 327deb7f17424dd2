#!/usr/bin/env bash
# Pre-training, then five tasks of GLUE: a row of docs/background/leaderboard.md.
#
#   runs/five-tasks.sh OUT GLUE TEXT... [-- KEY...]
#
# OUT: a new folder; run the script again to resume. GLUE: a folder of CoLA, SST-2, MRPC, STS-B and RTE with their train.tsv
# and dev.tsv. TEXT: inputs of `electra-fast prepare`: .txt, .jsonl, .parquet (.gz, .zst), a folder. KEY: options of
# `electra-fast pretrain`; by default the proposal of `plan` for an hour on this machine. VOCAB: entries of the vocabulary (8192).
# SEEDS: number of seeds per task (3). UNTIL=run: stop before the tasks.
set -euo pipefail
out=$1 glue=$(realpath "$2") texts=()
shift 2
while [ $# -gt 0 ] && [ "$1" != -- ]; do texts+=("$1"); shift; done
shift $(($# > 0))
mkdir -p "$out/glue"

# The leaderboard uses 10,000 training examples of SST-2, so that a row takes an afternoon.
for task in CoLA SST-2 MRPC STS-B RTE; do
  mkdir -p "$out/glue/$task"
  cp "$glue/$task/dev.tsv" "$out/glue/$task/"
  sed -n "1,$([ $task = SST-2 ] && echo 10001 || echo '$')p" "$glue/$task/train.tsv" > "$out/glue/$task/train.tsv"
done

# A vocabulary and a corpus, with 0.5 % of the documents as the validation set.
[ -e "$out/words/vocab.txt" ] || electra-fast vocab "${texts[@]}" --size "${VOCAB:-8192}" --out "$out/words/vocab.txt"
electra-fast prepare "${texts[@]}" --vocab "$out/words/vocab.txt" --holdout 0.005 --out "$out/shards"

# A proposal of size, steps and learning rates for an hour on this machine, made once.
if [ $# = 0 ]; then
  [ -e "$out/run.toml" ] || electra-fast plan "$out/shards" --hours 1 --json > "$out/plan.json"
  [ -e "$out/run.toml" ] || python3 -c 'import json, sys; print(json.load(sys.stdin)["config"])' < "$out/plan.json" > "$out/run.toml"
  set -- --config "$out/run.toml"
fi
electra-fast pretrain "$out/shards" --out "$out/run" "$@"
[ "${UNTIL:-}" != run ] || exit 0

# Fine-tunes on each task with the defaults; the row is the mean of the medians on the validation sets.
electra-fast finetune "$out/run" --glue "$out/glue" --task cola,sst2,mrpc,stsb,rte --seeds "${SEEDS:-3}" --out "$out/tasks"
python3 - "$out/tasks/results.json" <<'END'
import json, sys
medians = {name: 100 * task["median"] for name, task in json.load(open(sys.argv[1])).items()}
print(*(f"{name} {median:.1f}" for name, median in medians.items()), f"mean {sum(medians.values()) / len(medians):.1f}", sep="  ")
END
