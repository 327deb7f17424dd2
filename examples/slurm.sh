#!/bin/bash
# Pre-trains on the nodes of a SLURM job, one rank per GPU, over as many time limits as it takes.
#
#   sbatch examples/slurm.sh CORPUS RUN [options of `electra-fast pretrain`]
#
# Every rank reads CORPUS, and rank 0 writes RUN: both must be on a file system that all nodes share. Activate the
# Python environment below, and adapt the #SBATCH lines.
#
# Two minutes before the time limit, SLURM sends SIGUSR1 to every rank. (With --signal=B:USR1@120 only this script
# would get it.) One rank that receives it is enough: all of them stop after the same step, rank 0 writes a
# checkpoint, and they exit with 128 + 10 = 138. (With --train.max_minutes they stop by themselves, with 75.) This
# script then requeues its job, which starts again from here and resumes at that checkpoint. Any other exit code ends
# the job: 0 if the run is complete, 2 for an error that its last lines explain.
#
#SBATCH --job-name=electra-fast
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
# All GPUs of a node for each of its ranks, which choose one; with --gpus-per-task a rank would see only a single GPU.
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
# One log for all the parts of a run.
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
corpus=$1
run=$2
shift 2

# source /path/to/environment/bin/activate

# srun no longer takes --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# Ranks never exit at exactly the same time. With --kill-on-bad-exit=1, or where the cluster has that by default, the
# first to exit with 138 would make srun terminate the others, and srun's own exit code would not be 138. Instead, a
# rank that others outlive by 60 seconds ends the job step.
srun --kill-on-bad-exit=0 --wait=60 python -m electra_fast pretrain --data "$corpus" --out "$run" "$@"
code=$?

if [ "$code" -eq 138 ] || [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
