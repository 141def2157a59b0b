#!/usr/bin/env bash
# Train on Slurm. From the repository's root, with the environment active:
#
#   sbatch configs/launch/slurm.sh llama_8b.yaml --train.steps=10000
#   sbatch --nodes 16 --time 2-0 --partition gpu configs/launch/slurm.sh llama_8b.yaml --run.dir=/shared/runs/mine
#
# Options of sbatch before the script win over those below. The repository, its environment and run.dir lie on a file system
# that all nodes see. Output: slurm-JOB.txt in the folder of submission (local rank 0 of every node); each rank's
# own: runs/logs/JOB/NODE/.
# At the time limit, or when preempted, it saves, is queued again under the same number and goes on; so it does after a node failed.
# Without a time limit's or a preemption's signal a job that ends has ended: runs/.../status.json says how.
#SBATCH --job-name=meshwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.txt
# --ntasks-per-node=1: one torchrun a node, which starts the processes.
# --open-mode: a job that is queued again must not empty its own output.
#SBATCH --open-mode=append
#SBATCH --requeue
# USR1 to this script alone, 180 s before the time limit: more than torchrun allows its workers (150), more than run.grace_s (120).
# The same at a preemption where the cluster says PreemptParameters=send_user_signal and a GraceTime as long.
#SBATCH --signal=B:USR1@180
# Not the login node's limits, of which ulimit -l is often 64 KiB: those of slurmd.
#SBATCH --propagate=NONE
set -uo pipefail

if [ $# -lt 1 ] || [ ! -x configs/launch/nodes.sh ]; then
  echo "usage, from the repository's root: sbatch configs/launch/slurm.sh CONFIG [--section.key=value ...]" >&2
  exit 2
fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((29400 + SLURM_JOB_ID % 1000))  # two jobs that share a node must not meet

again=
# shellcheck disable=SC2329  # the trap calls it
save_and_queue_again() {
  again=yes
  echo "slurm.sh: $(date -Is): time is nearly up; saving, to be queued again"
  scancel --signal=TERM "$SLURM_JOB_ID.0"
}
trap save_and_queue_again USR1
trap : TERM  # scancel and requeue send it here too: the step is still saving, and ends with this script

# --cpu-bind=none: all processes of a node live in this one task. --kill-on-bad-exit=0: the first node that has saved and left must not
# end the others' save. --wait: but no node waits for ever for one that is gone.
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
