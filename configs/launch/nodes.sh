#!/usr/bin/env bash
# Train on several machines. Run the same command on each of them, from the repository's root, in the same environment:
#
#   configs/launch/nodes.sh FIRST_HOST[:PORT] NODES CONFIG [--section.key=value ...]
#
# FIRST_HOST is the rendezvous host (c10d, port 29400): one of the machines, as a name or address that all of them can reach.
# run.dir must be a shared folder with the same path on every machine: rank 0 writes the logs there, every rank its shards.
# One process per GPU is started; set PET_NPROC_PER_NODE=2 before the command to change that, or if there is no GPU.
# The screen shows local rank 0 of this machine; the output of every rank is in runs/logs/ID/HOST/*/attempt_*/RANK/{stdout,stderr}.log.
# To stop: SIGTERM or Ctrl-C on all machines; all save after the same step, and the same command resumes. A signal on one machine
# makes all machines save, but torchrun on the others then waits 300 s for the machine that has left, and ignores signals.
set -euo pipefail

if [ $# -lt 3 ] || [[ ! $2 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: configs/launch/nodes.sh FIRST_HOST[:PORT] NODES CONFIG [--section.key=value ...]" >&2
  echo "CONFIG: a name in configs/, or a path; a relative path is relative to the repository's root" >&2
  exit 2
fi
first=${1%%:*} port=29400 nodes=$2 config=$3
[[ $1 == *:* ]] && port=${1##*:}
shift 3
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Whether this machine opens the port. Slurm and Kubernetes number their nodes; otherwise it is the machine with one of FIRST_HOST's
# addresses. (torchrun compares FIRST_HOST with the address of this machine's own name, which is often 127.0.1.1.)
is_first() {
  local number=${SLURM_NODEID:-${PET_NODE_RANK:-}} address
  [ -n "$number" ] && { [ "$number" = 0 ]; return; }
  [ "$first" = "$(hostname)" ] && return
  for address in $(getent ahosts "$first" | awk '{print $1}' | sort -u); do
    [[ " $(hostname -I) 127.0.0.1 ::1 " == *" $address "* ]] && return
  done
  return 1
}

# This machine's address on the route to FIRST_HOST, and the interface with that address. Empty without `ip` (iproute2).
own_address() {
  local address
  address=$(getent ahosts "$first" | awk 'NR == 1 {print $1}')
  ip -o route get "$address" 2>/dev/null | sed -n 's/.* src \([^ ]*\).*/\1/p'
}
interface_of() {
  ip -o address show | awk -v wanted="$1" '{split($4, part, "/"); if (part[1] == wanted) {print $2; exit}}'
}

# By default torchrun (for the rendezvous) and gloo (for listening) use the address of this machine's own name. gloo carries the
# agreements between ranks (stop, save, which rank is stuck), also next to NCCL. Where /etc/hosts maps the name to 127.0.1.1, as
# Debian and Ubuntu do, no other machine can reach it, and all hang.
local_address=()
own=$(own_address || true)
if [ -n "$own" ]; then
  local_address=(--local-addr "$own")
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$(interface_of "$own")}
fi
# NCCL finds InfiniBand and its interfaces automatically. If it uses a wrong one (a management network), set NCCL_SOCKET_IFNAME and
# NCCL_IB_HCA before the command. WARN logs the failed call; without it an error is only "unhandled system error".
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# -l: RDMA pins memory; a low limit fails with "ibv_reg_mr failed: Cannot allocate memory". -n: shards, data, and sockets to all peers.
ulimit -S -l "$(ulimit -H -l)"
ulimit -S -n "$(ulimit -H -n)"
if [ -d /dev/infiniband ] && [ "$(ulimit -l)" != unlimited ]; then
  echo "nodes.sh: $(hostname): ulimit -l is $(ulimit -l) KiB; InfiniBand needs unlimited (limits.conf, or LimitMEMLOCK of slurmd)" >&2
fi
# torchrun would set 1 with a warning if it is unset; run.threads sets the threads of the run.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-gpu}
# The time torchrun gives its workers to save after a signal, before it kills them: longer than run.grace_s (120). Read by torch 2.13.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}

id=${SLURM_JOB_ID:-nodes}
logs=runs/logs/$id/${SLURMD_NODENAME:-$(hostname)}
mkdir -p "$logs"
# join_timeout: machines start at different times (images, queues). max-restarts: if a worker dies, all workers restart from the last
# commit; three failures at the same step end the run. exec: signals reach torchrun, which forwards them to its workers.
exec torchrun --nnodes "$nodes" --rdzv-backend c10d --rdzv-id "$id" --rdzv-endpoint "$first:$port" \
  --rdzv-conf "is_host=$(is_first && echo 1 || echo 0),join_timeout=1800" --max-restarts 3 \
  "${local_address[@]}" --log-dir "$logs" --tee 3 --local-ranks-filter 0 \
  -m train.main --config "$config" "$@"
