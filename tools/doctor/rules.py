"""Rules: what of a machine's facts and environment variables will fail or be slow, and how to mend it. Pure
functions of the facts."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address

from meshwright.tools.doctor.facts import OPTIONAL, Facts, Finding, Unknown

SHOWN = (
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "NVIDIA_TF32",
    "KMP_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "TRITON_",
    "PET_",
    "CXX",
)
OFF = ("", "0", "false", "False", "OFF")
# Variable, what it does when on (source: NCCL's and PyTorch's documentation of their environment variables).
SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel: nothing overlaps",
    "NCCL_P2P_DISABLE": "sends between GPUs of a node through host memory, not over NVLink",
    "NCCL_IB_DISABLE": "sends between nodes over TCP, not InfiniBand",
    "NCCL_SHM_DISABLE": "sends between processes of a node over the network",
    "TORCHDYNAMO_DISABLE": "compiles nothing, whatever parallel.compile says",
    "TORCH_COMPILE_DISABLE": "compiles nothing, whatever parallel.compile says",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "compiles everything anew at each start",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "asks the driver for every tensor",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "TORCH_SHOW_CPP_STACKTRACES": "looks up symbols at each error, which takes minutes",
}


# Bytes that a save needs are checked by the saver itself; below this even logs and compiled graphs have no
# room.
LEAST_FREE_GIB = 1.0
# NCCL maps buffers of about 10 MB for each peer of the node; Docker's default of 64 MiB is too little for 8
# GPUs.
LEAST_SHM_GIB = 1.0
# Linux's own default: sockets to every peer, a quarter for shards of the data, libraries
LEAST_OPEN_FILES = 1024
SLOW_WRITE_MB_S = 200.0  # an 8B's state of 96 GB in float32 takes 8 minutes at this rate
LEAST_MEMORY_GIB = 4.0  # torch, its compiler's workers and a process of a small model
NETWORK = ("nfs", "lustre", "cifs", "smb", "9p", "fuse", "gpfs", "beegfs", "ceph", "wekafs", "virtiofs")
ORDER = ("fails", "slow", "note")


def judge(facts: Facts) -> list[Finding]:
    """All findings, the most important first."""
    rules = (judge_software, judge_trials, judge_folders, judge_machine, judge_gpus)
    found = itertools.chain.from_iterable(rule(facts) for rule in rules)
    environment = judge_environment(facts.environment)
    return sorted([*found, *environment], key=lambda finding: ORDER.index(finding.kind))


def count_gpus(facts: Facts) -> int:
    """Those that the driver or torch sees."""
    counts = (facts.software.gpus_of_torch, 0 if isinstance(facts.gpus, Unknown) else len(facts.gpus))
    return max(0 if isinstance(count, Unknown) else count for count in counts)


def judge_software(facts: Facts) -> Iterator[Finding]:
    """A GPU that is there and that torch does not see; what inductor needs; cuDNN; packages."""
    software, without = facts.software, "or train without compiling: --parallel.compile.enabled=false"
    if facts.gpus and not isinstance(facts.gpus, Unknown) and not software.gpus_of_torch:
        yield _unseen(facts, f"here are {len(facts.gpus)} x {facts.gpus[0].name}, and")
    if not software.compiler:
        named = f": CXX={facts.environment['CXX']} is none" if "CXX" in facts.environment else ""
        remedy = f"apt-get install g++, or unset CXX if it names another; {without}"
        yield Finding("fails", f"no C++ compiler{named}", remedy)
    if not software.python_headers:
        what = "no headers of this Python (Python.h), which compiling needs"
        yield Finding("fails", what, f"apt-get install python3-dev; {without}")
    if isinstance(cudnn := software.versions.get("cuDNN"), Unknown):
        yield Finding(
            "slow",
            f"cuDNN cannot be used: {cudnn.unknown}",
            "take another one's folder out of LD_LIBRARY_PATH: torch has its own",
        )
    if missing := [name for name in OPTIONAL if software.versions.get(name) == ""]:
        remedy = "pip install -e '.[hf,float8]' for datasets, Hugging Face comparisons and float8"
        yield Finding("note", f"not installed: {', '.join(missing)}", remedy)


def _unseen(facts: Facts, here: str) -> Finding:
    """Why torch does not see the GPUs that the driver sees."""
    software = facts.software
    if not software.torch_cuda:
        remedy = "install torch with CUDA, as pytorch.org says for this driver"
        return Finding("fails", f"{here} this torch is a build for CPUs", remedy)
    if facts.environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return Finding("fails", f"{here} CUDA_VISIBLE_DEVICES hides them", "unset CUDA_VISIBLE_DEVICES")
    return Finding(
        "fails",
        f"{here} torch, built for CUDA {software.torch_cuda}, cannot use them with driver "
        f"{software.versions.get('driver', '')}",
        "update the driver, or install a torch built for an older CUDA",
    )


def judge_trials(facts: Facts) -> Iterator[Finding]:
    """What was tried for real."""
    known = not facts.software.compiler or not facts.software.python_headers
    if facts.compiled.failed and not known:
        yield Finding(
            "fails",
            f"torch.compile does not work here: {facts.compiled.failed}",
            "mend what it names, or train without it: --parallel.compile.enabled=false",
        )
    if facts.all_reduce.failed:
        yield Finding(
            "fails",
            f"two processes of this machine cannot reduce together: {facts.all_reduce.failed}",
            "NCCL_DEBUG=INFO says what NCCL tried; gloo goes over the interface GLOO_SOCKET_IFNAME: try lo",
        )


def judge_folders(facts: Facts) -> Iterator[Finding]:
    """Where a run writes, and where compiled graphs lie."""
    run, cache = facts.run_folder, facts.cache_folder
    if not run.writable:
        why = f": {run.problem}" if run.problem else ""
        yield Finding("fails", f"{run.path} cannot be written{why}", "name a folder that can: --run.dir")
    if not cache.writable:
        remedy = "name a folder that can: --parallel.compile.cache_dir"
        yield Finding("fails", f"the compile cache {cache.path} cannot be written", remedy)
    if isinstance(run.free_gib, float) and run.free_gib < LEAST_FREE_GIB:
        remedy = "make room, or name another folder: --run.dir"
        yield Finding("fails", f"{run.path} has {run.free_gib:.2f} GiB free", remedy)
    if isinstance(run.write_mb_s, float) and run.write_mb_s < SLOW_WRITE_MB_S:
        yield Finding(
            "slow",
            f"{run.path} takes {run.write_mb_s:.0f} MB/s, flushed, so 16 GB of a checkpoint take "
            f"{16000 / run.write_mb_s / 60:.1f} minutes",
            "put run.dir on a faster disk, or save less often (checkpoint.every)",
        )
    if str(cache.filesystem).startswith(NETWORK):
        remedy = "put it on a local disk: TORCHINDUCTOR_CACHE_DIR"
        yield Finding("slow", f"the compile cache {cache.path} is on {cache.filesystem}", remedy)


def judge_machine(facts: Facts) -> Iterator[Finding]:
    """ulimits, shared memory, memory, cores, and the name by which others reach this machine."""
    machine, gpus = facts.machine, count_gpus(facts)
    if isinstance(machine.most_open_files, int) and machine.most_open_files < LEAST_OPEN_FILES:
        yield Finding(
            "fails",
            f"ulimit -Hn is {machine.most_open_files}; data and sockets to all peers need {LEAST_OPEN_FILES} "
            "and more",
            "nofile in /etc/security/limits.conf; Docker: --ulimit nofile=65536",
        )
    if isinstance(machine.memlock_kib, int) and machine.infiniband:
        yield Finding(
            "fails",
            f"ulimit -l is {machine.memlock_kib} KiB, and InfiniBand ({', '.join(machine.infiniband)}) pins "
            "more",
            "memlock unlimited in /etc/security/limits.conf; Slurm: LimitMEMLOCK=infinity of slurmd",
        )
    if isinstance(machine.shm_gib, float) and machine.shm_gib < LEAST_SHM_GIB:
        yield Finding(
            "fails" if gpus > 1 else "note",
            f"/dev/shm has {machine.shm_gib * 1024:.0f} MiB; NCCL on several GPUs needs more",
            "docker --shm-size=16g; Kubernetes: an emptyDir of medium Memory, as "
            "configs/launch/kubernetes.yaml has",
        )
    amounts = [value for value in (machine.available_gib, machine.cgroup_gib) if isinstance(value, float)]
    if amounts and min(amounts) < LEAST_MEMORY_GIB:
        yield Finding(
            "slow",
            f"{min(amounts):.1f} GiB of memory can be had; torch and its compiler take up to "
            f"{LEAST_MEMORY_GIB:.0f}",
            "raise the container's limit, or end other programs",
        )
    if isinstance(machine.cores, int) and 0 < machine.cores < 2 * gpus:
        yield Finding(
            "slow",
            f"{machine.cores} cores for {gpus} GPUs: each process needs one that launches kernels and one "
            "that loads and saves",
            "ask for more (Slurm: --exclusive; Kubernetes: resources.limits.cpu)",
        )
    yield from _judge_name(facts)


def _judge_name(facts: Facts) -> Iterator[Finding]:
    name, addresses = f"this machine's own name, {facts.machine.hostname},", facts.machine.addresses
    if isinstance(addresses, Unknown):
        remedy = "add it to /etc/hosts; torchrun and gloo ask for it"
        yield Finding("slow", f"{name} resolves to nothing: {addresses.unknown}", remedy)
    elif "GLOO_SOCKET_IFNAME" not in facts.environment and all(
        ip_address(one).is_loopback for one in addresses
    ):
        yield Finding(
            "note",
            f"{name} is {addresses[0]}: no other machine reaches gloo there",
            "for several machines: GLOO_SOCKET_IFNAME=eth0 or so; configs/launch/nodes.sh finds it",
        )


def judge_gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs that are held back, and those of one node without NVLink between them."""
    for number, gpu in enumerate(() if isinstance(facts.gpus, Unknown) else facts.gpus):
        limit, full = gpu.power_limit_w, gpu.default_power_limit_w
        if limit and full and limit < 0.98 * full:
            remedy = f"nvidia-smi -i {number} -pl {full:.0f}, if that is not on purpose"
            yield Finding("slow", f"GPU {number} may take {limit:.0f} W of its {full:.0f} W", remedy)
    if isinstance(facts.topology, tuple) and (slow := find_slow_pairs(facts.topology)):
        yield Finding(
            "slow",
            f"no NVLink between {', '.join(slow[:4])}{' and others' if len(slow) > 4 else ''}",
            "keep tensor parallelism off these pairs (parallel.tp=1): it waits for every layer's sums",
        )


def find_slow_pairs(topology: Sequence[str]) -> list[str]:
    """Of `nvidia-smi topo -m`, the pairs of GPUs that are not linked by NVLink (NV and a number)."""
    rows = [line.split() for line in topology]
    head = next((row for row in rows if row[:1] == ["GPU0"]), [])
    gpus = [name for name in head if name.startswith("GPU") and name[3:].isdecimal()]
    cells = {row[0]: row[1 : len(gpus) + 1] for row in rows if row and row[0] in gpus and row is not head}
    return [
        f"{a}-{b} ({cells[a][j]})"
        for i, a in enumerate(gpus)
        for j, b in enumerate(gpus)
        if i < j and a in cells and len(cells[a]) > j and not cells[a][j].startswith("NV")
    ]


def judge_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that cost speed, or that take a setting of ours away."""
    for name, effect in SWITCHES.items():
        if environment.get(name, "") not in OFF:
            yield Finding("slow", f"{name}={environment[name]} {effect}", f"unset {name}")
    if environment.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        yield Finding(
            "slow",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective over all ranks",
            "unset TORCH_DISTRIBUTED_DEBUG",
        )
    threads = environment.get("OMP_NUM_THREADS", "1")
    # a list: for nested regions (OpenMP 5.2, 21.2.1)
    if not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", threads):
        yield Finding(
            "slow",
            f"OMP_NUM_THREADS={threads} is no number of threads: OpenMP ignores it, and says so in every "
            "process",
            "OMP_NUM_THREADS=1, or unset it: a run's threads are run.threads",
        )
    if environment.get("NCCL_DEBUG") in ("INFO", "TRACE"):
        yield Finding(
            "note",
            f"NCCL_DEBUG={environment['NCCL_DEBUG']} prints pages",
            "NCCL_DEBUG=WARN names what failed",
        )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if name in environment and "expandable_segments:True" not in environment[name]:
            yield Finding(
                "note",
                f"{name}={environment[name]} switches run.expandable_segments off",
                f"add expandable_segments:True, or unset {name}",
            )


def choose_shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Of all variables those that a run can feel."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(SHOWN)}
