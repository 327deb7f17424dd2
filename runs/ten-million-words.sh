#!/usr/bin/env bash
# Ten million words, each read at most PASSES times (10), then the minimal pairs of BLiMP: a row of docs/background/leaderboard.md.
#
#   runs/ten-million-words.sh OUT PAIRS TEXT... [-- KEY...]
#
# OUT: a new folder; run the script again to resume. PAIRS: the .jsonl files of BLiMP, as their folder or in one file. TEXT:
# .txt, .jsonl, .jsonl.zst or .parquet. KEY: options of `electra-fast pretrain`, by default `--preset mini`.
set -euo pipefail
out=$1 texts=() here=$(dirname "$0")
[ -d "$2" ] && pairs=("$2"/*.jsonl) || pairs=("$2")
shift 2
while [ $# -gt 0 ] && [ "$1" != -- ]; do texts+=("$1"); shift; done
shift $(($# > 0))
[ $# -gt 0 ] || set -- --preset mini
mkdir -p "$out"

# Ten million words in sentences, each as a separate document, like the pairs of the test.
[ -e "$out/sentences.txt" ] || python3 "$here/sentences.py" 10_000_000 "${texts[@]}" > "$out/part"
[ -e "$out/sentences.txt" ] || mv "$out/part" "$out/sentences.txt"
[ -e "$out/words/vocab.txt" ] || electra-fast vocab "$out/sentences.txt" --documents line --size 8192 --out "$out/words/vocab.txt"
electra-fast prepare "$out/sentences.txt" --documents line --vocab "$out/words/vocab.txt" --holdout 0.005 --out "$out/shards"

# Rows of 64 tokens, 64 rows per step. Masking 15 % of the tokens improves these scores (bench/LOG.md).
tokens=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["num_tokens"])' "$out/shards/manifest.json")
electra-fast pretrain "$out/shards" --out "$out/run" --steps $((tokens * ${PASSES:-10} / 4096)) \
  --data.sequence_length 64 --batch-size 64 --data.mask_prob 0.15 "$@"
electra-fast evaluate "$out/run" --pairs "${pairs[@]}" --out "$out/pairs"
