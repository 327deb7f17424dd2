#!/bin/bash
# Pre-trains with torchrun, one rank per GPU, on one node or on several.
#
#   examples/torchrun.sh CORPUS RUN [options of `electra-fast pretrain`]
#   NUM_NODES=2 RDZV_ENDPOINT=node1:29400 examples/torchrun.sh CORPUS RUN [options]      the same command on each node
#
# RDZV_ENDPOINT is the host name of one of the nodes and a free port there. Every rank reads CORPUS, and rank 0 writes
# RUN: with several nodes, both must be on a file system that all of them share. RANKS_PER_NODE is the number of GPUs
# unless it is set.
#
# If a rank dies or exits with any code but 0, torchrun terminates the others and starts all of them again, here up to
# 3 times. Each time, every rank resumes at the newest checkpoint of RUN. An error that happens again, such as a wrong
# option, ends the run after the last attempt.
#
# Signals go to torchrun, which passes them on to the ranks: the run stops after its current step, writes a
# checkpoint, and is not restarted. Run the same command to resume. Ranks that need more than 30 seconds for that are
# killed (torch 2.12 or newer: --shutdown-timeout changes the limit). torchrun's own exit code is then 1 whatever the
# signal. If torchrun ends without a signal to its ranks, for example by SIGKILL, they notice and stop in the same way.
#
# With --train.max_minutes, torchrun's exit code is also 1, after restarts that train one step each, because the minutes
# count from the start of torchrun. To stop at once, remove --max-restarts.
#
# torchrun replaces the handler for SIGHUP, so nohup does not protect the run from a closed terminal: use tmux, or
# take SIGHUP off that list.

set -eu
corpus=$1
run=$2
shift 2

# The c10d rendezvous restarts all nodes together; with --node-rank and --master-addr, each node restarts alone.
exec torchrun \
    --nnodes="${NUM_NODES:-1}" \
    --nproc-per-node="${RANKS_PER_NODE:-gpu}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${RDZV_ENDPOINT:-localhost:0}" \
    --rdzv-id=electra-fast \
    --max-restarts=3 \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \
    -m electra_fast pretrain "$corpus" --out "$run" "$@"
