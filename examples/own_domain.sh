#!/bin/bash
# Adapts an encoder to text of your domain, compares both by a task of that domain, and exports the adapted one.
#
#   examples/own_domain.sh MODEL TEXTS LABELED OUT [options of `electra-fast adapt`]
#
# MODEL is a run, or a folder of transformers such as a downloaded bert-base-uncased (docs/fine-tuning.md lists the
# supported models). TEXTS is a file or folder of unlabeled text (.txt, .jsonl, .parquet, plain or compressed),
# LABELED a file with the columns `text` and `label`. After a kill, the same command continues.

set -eu
electra-fast adapt "$1" "$2" --task-data "$3" --out "$4/run" "${@:5}"
electra-fast export "$4/run" --out "$4/model"
