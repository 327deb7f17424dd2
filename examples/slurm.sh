#!/bin/bash
# Pre-trains on the nodes of a SLURM job, one rank per GPU, over several time limits if needed.
#
#   sbatch examples/slurm.sh CORPUS RUN [options of `electra-fast pretrain`]
#
# Every rank reads CORPUS, and rank 0 writes RUN: both must be on a file system that all nodes share. Activate the
# Python environment below, and adapt the #SBATCH lines.
#
# srun starts torchrun on each node, and torchrun starts the ranks. Two minutes before the time limit, SLURM sends SIGUSR1 to
# this script, which sends SIGTERM to srun and so to each torchrun, which passes it on: all ranks stop after the same
# step, and rank 0 writes a checkpoint, for which torchrun leaves them 30 seconds. This script then requeues its job,
# which starts again from here and resumes at that checkpoint. Without that signal the job ends: with 0 if the run is
# complete, else with 1 for an error that the last lines explain.
#
#SBATCH --job-name=electra-fast
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
# One log for all jobs of a run.
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
corpus=$1
run=$2
shift 2

# source /path/to/environment/bin/activate

# srun no longer takes --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
is_warned=0
trap 'is_warned=1; kill -TERM "$srun"' USR1

# This script runs on the first node, where the ranks meet. One torchrun never ends at exactly the same time as another:
# with --kill-on-bad-exit=1, or where the cluster has that by default, the first to end would have the others killed.
srun --kill-on-bad-exit=0 --wait=60 torchrun \
    --nnodes="${SLURM_NNODES:-1}" \
    --nproc-per-node=gpu \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$(hostname):$((20000 + SLURM_JOB_ID % 40000))" \
    --rdzv-id="$SLURM_JOB_ID" \
    -m electra_fast pretrain "$corpus" --out "$run" "$@" &
srun=$!
wait "$srun"
code=$?

if [ "$is_warned" -eq 1 ]; then
    wait "$srun" # the signal has ended the first wait
    code=$?
    [ "$code" -eq 0 ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
