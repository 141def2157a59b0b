"""Rules that find problems in a machine's facts, and name a fix for each. Pure functions of the facts."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from meshwright.tools.doctor.facts import Facts

KINDS = ("fails", "slow", "note")  # a run will fail, it will be slow, it may matter
# Name, kind and text of each problem, with facts in {}, and below it how to fix it. Named by a fact: it is
# unknown for that {reason}. FACT<N: it is less. Sockets to all peers, a quarter of the files for data and
# libraries need 1,024 files; logs and compiled graphs 1 GiB of disk; torch, its compiler's workers and one
# process of a small model 4 GiB of memory.
PROBLEMS = """
compiled fails: torch.compile fails: {reason}
  apt-get install g++ python3-dev, or unset a wrong CXX; else train with --parallel.compile.enabled=false
all_reduce fails: an all-reduce of two processes on this machine fails: {reason}
  NCCL: NCCL_DEBUG=INFO prints each attempt; gloo: set its interface, GLOO_SOCKET_IFNAME=lo
build fails: {count} x {gpu} not used: this torch is a build for CPUs
  install torch with CUDA for this driver, see pytorch.org
hidden fails: {count} x {gpu} not used: CUDA_VISIBLE_DEVICES hides them
  unset CUDA_VISIBLE_DEVICES
driver fails: {count} x {gpu} not used: torch with CUDA {cuda_of_torch} cannot use them with driver {driver}
  update the driver, or install a torch built for an older CUDA
run_free_gib fails: {run_folder} is not writable: {reason}
  use a writable folder: --run.dir
run_free_gib<1 fails: {run_folder} has {run_free_gib:.2f} GiB free
  free disk space, or use another folder: --run.dir
cache_filesystem fails: the compile cache {cache_folder} is not writable: {reason}
  use a writable folder: --parallel.compile.cache_dir
open_files<1024 fails: ulimit -Hn is {open_files}; data and sockets to all peers need at least 1024
  raise nofile in /etc/security/limits.conf; Docker: --ulimit nofile=65536
memlock fails: ulimit -l is {memlock_kib} KiB; InfiniBand ({infiniband[0]}) pins more
  set memlock unlimited in /etc/security/limits.conf; Slurm: LimitMEMLOCK=infinity for slurmd
compile slow: torch.compile needs {compiled}, for one matrix product; most machines need less than 30 s
  end other programs, or request more cores (Slurm: --exclusive; Kubernetes: resources.limits.cpu)
shm {kind}: /dev/shm has {shm_gib:.2f} GiB free; NCCL on several GPUs needs more
  docker --shm-size=16g; Kubernetes: an emptyDir of medium Memory, as in configs/launch/kubernetes.yaml
memory_gib<4 slow: {memory_gib:.1f} GiB of memory are available; torch and its compiler need up to 4
  raise the container's limit, or end other programs
cores slow: {cores} cores for {count} GPUs: each process needs one to launch kernels and one to load and save
  request more (Slurm: --exclusive; Kubernetes: resources.limits.cpu)
kinds slow: GPUs of different kinds: {names}: all ranks wait for the slowest
  choose GPUs of one kind with CUDA_VISIBLE_DEVICES
power slow: GPU {number} is limited to {limit:.0f} W of {default:.0f} W
  if this is not intended: nvidia-smi -i {number} -pl {default:.0f}
cudnn slow: cuDNN cannot be used: {reason}
  remove the folder of another cuDNN from LD_LIBRARY_PATH: torch brings its own
cache slow: the compile cache {cache_folder} is on {cache_filesystem}
  move it to a local disk: TORCHINDUCTOR_CACHE_DIR
addresses slow: the host name {hostname} does not resolve: {reason}
  add it to /etc/hosts; torchrun and gloo resolve it
loopback note: the host name {hostname} resolves to {addresses[0]}: other machines cannot reach gloo there
  for several machines set GLOO_SOCKET_IFNAME, such as eth0; configs/launch/nodes.sh finds it
gpus note: nvidia-smi fails: {reason}
  if this machine has GPUs, one may be lost until the machine is restarted
variable slow: {name}={value} {effect}
  unset {name}
threads slow: OMP_NUM_THREADS={value} is not a number of threads: OpenMP ignores it, with warnings
  set OMP_NUM_THREADS=1, or unset it and set run.threads
debug note: NCCL_DEBUG={value} prints many lines per rank
  NCCL_DEBUG=WARN prints errors only
segments note: {name}={value} switches run.expandable_segments off
  add expandable_segments:True, or unset {name}
"""
# Variables and their effect when on (source: NCCL's and PyTorch's documentation of environment variables).
SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel: nothing overlaps",
    "NCCL_P2P_DISABLE": "sends between GPUs of a node through host memory, not over NVLink",
    "NCCL_IB_DISABLE": "sends between nodes over TCP, not InfiniBand",
    "NCCL_SHM_DISABLE": "sends between processes of a node over the network",
    "TORCHDYNAMO_DISABLE": "switches compilation off and overrides parallel.compile",
    "TORCH_COMPILE_DISABLE": "switches compilation off and overrides parallel.compile",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "compiles everything again at each start",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "allocates every tensor through the driver",
    "TORCH_DISTRIBUTED_DEBUG": "compares every collective over all ranks",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "TORCH_SHOW_CPP_STACKTRACES": "looks up symbols at each error, which takes minutes",
}
NETWORK = ("nfs", "lustre", "cifs", "smb", "9p", "fuse", "gpfs", "beegfs", "ceph", "wekafs", "virtiofs")
SLOW_COMPILE_S = 30.0
LEAST_SHM_GIB = 1.0  # NCCL maps about 10 MB for each peer of the node; Docker's default is 64 MiB


@dataclass(frozen=True)
class Finding:
    """A problem with its value, its kind (of KINDS), and how to fix it."""

    kind: str
    what: str
    remedy: str


def judge(facts: Facts) -> list[Finding]:
    """Return all findings, the most important first."""
    texts = {name: rest for name, *rest in re.findall(r"^(\S+) (\S+): (.*)\n  (.*)$", PROBLEMS, re.MULTILINE)}
    problems = [(name, {"reason": reason}) for name, reason in facts["failed"].items() if name in texts]
    for name, (fact, *least) in {name: name.split("<") for name in texts}.items():
        if least and (value := facts[fact]) is not None and value < int(least[0]):
            problems.append((name, {}))
    problems += [*find_problems(facts), *find_variables(facts["environment"])]
    findings = [
        Finding(*(text.format(**facts | values) for text in texts[name])) for name, values in problems
    ]
    return sorted(findings, key=lambda finding: KINDS.index(finding.kind))


def find_problems(facts: Facts) -> Iterator[tuple[str, Facts]]:
    """Yield the problems of GPUs, folders and addresses: their names, and the values in their texts."""
    gpus = facts["gpus"] or ()
    count = max(len(gpus), facts["gpus_of_torch"] or 0)
    if gpus and facts["gpus_of_torch"] == 0:
        hidden = facts["environment"].get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1")
        name = "build" if not facts["cuda_of_torch"] else "hidden" if hidden else "driver"
        yield name, {"count": count, "gpu": gpus[0]["name"], "driver": gpus[0]["driver"]}
    if len(names := sorted({gpu["name"] for gpu in gpus})) > 1:
        yield "kinds", {"names": ", ".join(names)}
    for number, gpu in enumerate(gpus):
        limit, default = gpu["power_limit_w"], gpu["default_power_limit_w"]
        if limit and default and limit < 0.98 * default:
            yield "power", {"number": number, "limit": limit, "default": default}
    if facts["compiled"] and float(facts["compiled"].split()[0]) > SLOW_COMPILE_S:
        yield "compile", {}
    if facts["memlock_kib"] is not None and facts["infiniband"]:
        yield "memlock", {}
    if facts["shm_gib"] is not None and facts["shm_gib"] < LEAST_SHM_GIB:
        yield "shm", {"kind": "fails" if count > 1 else "note"}
    if facts["cores"] is not None and facts["cores"] < 2 * count:
        yield "cores", {"count": count}
    if str(facts["cache_filesystem"]).startswith(NETWORK):
        yield "cache", {}
    loopback = facts["addresses"] and all(ip_address(each).is_loopback for each in facts["addresses"])
    if loopback and "GLOO_SOCKET_IFNAME" not in facts["environment"]:
        yield "loopback", {}


def find_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, Facts]]:
    """Yield the variables that cost speed or override a setting."""
    for name, value in environment.items():
        if name in SWITCHES and value not in ("", "0", "false", "False", "OFF", "INFO"):
            yield "variable", {"name": name, "value": value, "effect": SWITCHES[name]}
        # a list is valid: one number per level of nested regions (OpenMP 5.2, 21.2.1)
        if name == "OMP_NUM_THREADS" and not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", value):
            yield "threads", {"value": value}
        if name == "NCCL_DEBUG" and value in ("INFO", "TRACE"):
            yield "debug", {"value": value}
        if (
            name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
            and "expandable_segments:True" not in value
        ):
            yield "segments", {"name": name, "value": value}
