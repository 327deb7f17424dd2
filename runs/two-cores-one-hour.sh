#!/usr/bin/env bash
# An hour of pre-training on two cores, then five tasks of GLUE: a row of docs/leaderboard.md.
#
#   runs/two-cores-one-hour.sh OUT GLUE TEXT...
#
# OUT: a new folder; run the script again to resume. GLUE: a folder of CoLA, SST-2, MRPC, STS-B and RTE with their train.tsv
# and dev.tsv. TEXT: what `electra-fast prepare` reads: .txt, .jsonl, .parquet (.gz, .zst), a folder.
set -euo pipefail
out=$1 glue=$(realpath "$2")
shift 2
mkdir -p "$out/glue"
cores() { taskset --cpu-list 0,1 electra-fast "$@"; }

# The board cuts SST-2 to 10,000 training examples, so that a row takes an afternoon.
for task in CoLA SST-2 MRPC STS-B RTE; do
  mkdir -p "$out/glue/$task"
  cp "$glue/$task/dev.tsv" "$out/glue/$task/"
  sed -n "1,$([ $task = SST-2 ] && echo 10001 || echo '$')p" "$glue/$task/train.tsv" > "$out/glue/$task/train.tsv"
done

# Text to a corpus: its own vocabulary, a two-hundredth set aside to watch the run.
[ -e "$out/words/vocab.txt" ] || cores vocab "$@" --size 8192 --out "$out/words/vocab.txt"
cores prepare "$@" --vocab "$out/words/vocab.txt" --holdout 0.005 --out "$out/shards"

# What this machine can train in an hour: size, steps and rates, proposed once.
[ -e "$out/run.toml" ] || cores plan "$out/shards" --hours 1 --json > "$out/plan.json"
[ -e "$out/run.toml" ] || python3 -c 'import json, sys; print(json.load(sys.stdin)["config"])' < "$out/plan.json" > "$out/run.toml"
cores pretrain "$out/shards" --config "$out/run.toml" --out "$out/run"

# Three fine-tunings of each task by the defaults; the row is the mean of their medians on the development sets.
cores finetune "$out/run" --glue "$out/glue" --task cola,sst2,mrpc,stsb,rte --seeds 3 --out "$out/tasks"
python3 - "$out/tasks/results.json" <<'END'
import json, sys
medians = {name: 100 * task["median"] for name, task in json.load(open(sys.argv[1])).items()}
print(*(f"{name} {median:.1f}" for name, median in medians.items()), f"mean {sum(medians.values()) / len(medians):.1f}", sep="  ")
END
