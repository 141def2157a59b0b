#!/usr/bin/env bash
# Train on Slurm. From the repository's root, with the environment active:
#
#   sbatch configs/launch/slurm.sh llama_8b.yaml --train.steps=10000
#   sbatch --nodes 16 --time 2-0 --partition gpu configs/launch/slurm.sh llama_8b.yaml --run.dir=/shared/runs/mine
#
# Options of sbatch before the script override those below. The repository, its environment and run.dir must be on a file system
# that all nodes mount. Output: slurm-JOB.txt in the folder of submission (local rank 0 of every node); of each rank:
# runs/logs/JOB/NODE/.
# At the time limit, or when preempted, the job saves, is requeued under the same number and resumes; also after a node failure.
# A job that ends for any other reason is not requeued: runs/.../status.json contains the reason.
#SBATCH --job-name=meshwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.txt
# --ntasks-per-node=1: one torchrun per node, which starts the processes.
# --open-mode: a requeued job must append to its output.
#SBATCH --open-mode=append
#SBATCH --requeue
# USR1 to this script only, 180 s before the time limit: more than the grace period of torchrun (150) and run.grace_s (120).
# Also at a preemption if the cluster sets PreemptParameters=send_user_signal and a GraceTime of at least 180 s.
#SBATCH --signal=B:USR1@180
# NONE: use the limits of slurmd, not those of the login node, where ulimit -l is often 64 KiB.
#SBATCH --propagate=NONE
set -uo pipefail

if [ $# -lt 1 ] || [ ! -x configs/launch/nodes.sh ]; then
  echo "usage, from the repository's root: sbatch configs/launch/slurm.sh CONFIG [--section.key=value ...]" >&2
  exit 2
fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((29400 + SLURM_JOB_ID % 1000))  # two jobs that share a node must use different ports

again=
# shellcheck disable=SC2329  # the trap calls it
save_and_queue_again() {
  again=yes
  echo "slurm.sh: $(date -Is): time limit or preemption: saving, then requeueing"
  scancel --signal=TERM "$SLURM_JOB_ID.0"
}
trap save_and_queue_again USR1
trap : TERM  # scancel and requeue also send it to this script, which must not end while the step is saving

# --cpu-bind=none: all processes of a node belong to this one task. --kill-on-bad-exit=0: the first node that has saved and exited
# must not end the save of the others. --wait: but no node waits forever for one that has exited.
srun --cpu-bind=none --kill-on-bad-exit=0 --wait=300 configs/launch/nodes.sh "$address:$port" "$SLURM_JOB_NUM_NODES" "$@" &
step=$!
while kill -0 $step 2>/dev/null; do wait $step; done  # a trapped signal ends `wait`, not srun
wait $step
code=$?
if [ -n "$again" ]; then
  echo "slurm.sh: $(date -Is): queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
