#!/bin/bash
# Adapts an encoder to text of your domain by replaced-token detection, and compares both by a task of that domain.
#
#   examples/own_domain.sh MODEL TEXTS LABELED OUT [options of `electra-fast pretrain`]
#
# MODEL is a folder of transformers, such as a downloaded bert-base-uncased (docs/fine-tuning.md lists the supported
# models). TEXTS is a file or folder of unlabeled text (.txt, .jsonl, .parquet, plain or compressed),
# LABELED a file with the columns `text` and `label`. After a kill, the same command continues.

set -eu
model=$1
texts=$2
labeled=$3
out=$4
shift 4

# The encoder becomes the discriminator. Its generator is new, shares its embeddings, and adds a tenth to the cost of a
# step of bert-base. A few million tokens are too few to train one: our only experiment lost 4 points. `same-layers:4`
# copies the first 4 layers instead; or give a smaller model of the family.
if [ ! -e "$out/run" ]; then
    electra-fast import "$model" --generator small --out "$out/run"
fi

# The run has the model's tokenizer. Some documents are set aside: their losses are those to watch.
electra-fast prepare "$texts" --vocab "$out/run" --out "$out/shards" --holdout 0.02

# The settings are in OUT/run/config.toml; `import` has printed why. For more than 20 M tokens: --steps 5000.
electra-fast pretrain "$out/shards" --out "$out/run" "$@"
electra-fast export "$out/run" --out "$out/model"

# Whether it was worth it, only a task can tell: the encoder as it came, and as it is now.
electra-fast finetune "$model" --task classification --train "$labeled" --out "$out/before" --seeds 3
electra-fast finetune "$out/run" --task classification --train "$labeled" --out "$out/after" --seeds 3
