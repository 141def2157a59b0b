#!/usr/bin/env bash
# Train on several machines. The same line on each of them, from the repository's root, in the same environment:
#
#   configs/launch/nodes.sh FIRST_HOST[:PORT] NODES CONFIG [--section.key=value ...]
#
# FIRST_HOST is one of the machines, by a name or address that all of them reach; there they meet (c10d rendezvous, port 29400).
# run.dir must be a folder that every machine sees under the same path: rank 0 writes the logs there, every rank its shards.
# One process per GPU; PET_NPROC_PER_NODE=2 before the line says otherwise, and is needed where there is no GPU.
# The screen shows local rank 0 of this machine; what any rank prints is in runs/logs/ID/HOST/*/attempt_*/RANK/{stdout,stderr}.log.
# To stop: SIGTERM or Ctrl-C on all machines; all save after the same step, and the same line goes on. One machine's signal is
# enough for all to save, but the other machines' torchruns then wait 300 s for the one that has left, and hear no signal.
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

# Who opens the port. Slurm and Kubernetes number their nodes; else it is the machine that has one of FIRST_HOST's addresses.
# (torchrun itself compares FIRST_HOST with what this machine's own name resolves to, which is often 127.0.1.1.)
is_first() {
  local number=${SLURM_NODEID:-${PET_NODE_RANK:-}} address
  [ -n "$number" ] && { [ "$number" = 0 ]; return; }
  [ "$first" = "$(hostname)" ] && return
  for address in $(getent ahosts "$first" | awk '{print $1}' | sort -u); do
    [[ " $(hostname -I) 127.0.0.1 ::1 " == *" $address "* ]] && return
  done
  return 1
}

# This machine's address on the way to FIRST_HOST, and the interface that has it. Nothing where there is no `ip` to ask (iproute2).
own_address() {
  local address
  address=$(getent ahosts "$first" | awk 'NR == 1 {print $1}')
  ip -o route get "$address" 2>/dev/null | sed -n 's/.* src \([^ ]*\).*/\1/p'
}
interface_of() {
  ip -o address show | awk -v wanted="$1" '{split($4, part, "/"); if (part[1] == wanted) {print $2; exit}}'
}

# Left alone, the processes take the address of this machine's own name, torchrun for where they meet, and gloo, which carries the
# agreements between ranks (stop, save, who is stuck) also beside NCCL, for what it listens at. Where /etc/hosts makes that
# 127.0.1.1, as Debian and Ubuntu do, no other machine reaches it, and all wait.
local_address=()
own=$(own_address || true)
if [ -n "$own" ]; then
  local_address=(--local-addr "$own")
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$(interface_of "$own")}
fi
# NCCL finds InfiniBand and its interfaces itself. Where it takes a wrong one (a management network), say NCCL_SOCKET_IFNAME and
# NCCL_IB_HCA before the line. WARN names the call that failed; without it an error says only "unhandled system error".
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# RDMA pins memory: a low limit is "ibv_reg_mr failed: Cannot allocate memory". Files: the shards, the data, the sockets to every peer.
ulimit -S -l "$(ulimit -H -l)"
ulimit -S -n "$(ulimit -H -n)"
if [ -d /dev/infiniband ] && [ "$(ulimit -l)" != unlimited ]; then
  echo "nodes.sh: $(hostname): ulimit -l is $(ulimit -l) KiB; InfiniBand needs unlimited (limits.conf, or LimitMEMLOCK of slurmd)" >&2
fi
# torchrun says 1 where nobody has said anything, and prints a warning; our threads are run.threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-gpu}
# How long torchrun lets its workers save after a signal, before it kills them: longer than run.grace_s (120). torch 2.13 reads it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}

id=${SLURM_JOB_ID:-nodes}
logs=runs/logs/$id/${SLURMD_NODENAME:-$(hostname)}
mkdir -p "$logs"
# join_timeout: machines do not come at once (images, queues). max-restarts: a worker that dies is started again, with all others,
# from the last commit; three failures at the same step end it. exec: signals reach torchrun, which passes them to its workers.
exec torchrun --nnodes "$nodes" --rdzv-backend c10d --rdzv-id "$id" --rdzv-endpoint "$first:$port" \
  --rdzv-conf "is_host=$(is_first && echo 1 || echo 0),join_timeout=1800" --max-restarts 3 \
  "${local_address[@]}" --log-dir "$logs" --tee 3 --local-ranks-filter 0 \
  -m train.main --config "$config" "$@"
