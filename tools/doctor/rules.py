"""Rules that find problems in a machine's facts and environment variables, and name a fix for each. Pure
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
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "TORCH_SHOW_CPP_STACKTRACES": "looks up symbols at each error, which takes minutes",
}


# The saver itself checks the bytes that a save needs; below this limit even logs and compiled graphs do not
# fit.
LEAST_FREE_GIB = 1.0
# NCCL maps buffers of about 10 MB for each peer of the node; Docker's default of 64 MiB is too little for 8
# GPUs.
LEAST_SHM_GIB = 1.0
# Linux's default: sockets to every peer, a quarter of the files for shards of the data, libraries
LEAST_OPEN_FILES = 1024
SLOW_WRITE_MB_S = 200.0  # at this rate the float32 state of an 8B model, 96 GB, takes 8 minutes
LEAST_MEMORY_GIB = 4.0  # for torch, its compiler's workers and one process of a small model
NETWORK = ("nfs", "lustre", "cifs", "smb", "9p", "fuse", "gpfs", "beegfs", "ceph", "wekafs", "virtiofs")
ORDER = ("fails", "slow", "note")


def judge(facts: Facts) -> list[Finding]:
    """Return all findings, the most important first."""
    rules = (judge_software, judge_trials, judge_folders, judge_machine, judge_gpus)
    findings = itertools.chain.from_iterable(rule(facts) for rule in rules)
    environment = judge_environment(facts.environment)
    return sorted([*findings, *environment], key=lambda finding: ORDER.index(finding.kind))


def count_gpus(facts: Facts) -> int:
    """Return the number of GPUs that the driver or torch reports, the larger."""
    counts = (facts.software.gpus_of_torch, 0 if isinstance(facts.gpus, Unknown) else len(facts.gpus))
    return max(0 if isinstance(count, Unknown) else count for count in counts)


def judge_software(facts: Facts) -> Iterator[Finding]:
    """Check that torch sees the GPUs, that inductor has a C++ compiler and Python's headers, cuDNN, and
    optional packages."""
    software, without = facts.software, "or train without compiling: --parallel.compile.enabled=false"
    if facts.gpus and not isinstance(facts.gpus, Unknown) and not software.gpus_of_torch:
        yield _unseen(facts, f"{len(facts.gpus)} x {facts.gpus[0].name} not used:")
    if not software.compiler:
        cxx = f": CXX={facts.environment['CXX']} is not one" if "CXX" in facts.environment else ""
        remedy = f"apt-get install g++, or unset CXX if it is wrong; {without}"
        yield Finding("fails", f"no C++ compiler{cxx}", remedy)
    if not software.python_headers:
        what = "Python.h is missing: torch.compile needs the headers of this Python"
        yield Finding("fails", what, f"apt-get install python3-dev; {without}")
    if isinstance(cudnn := software.versions.get("cuDNN"), Unknown):
        yield Finding(
            "slow",
            f"cuDNN cannot be used: {cudnn.unknown}",
            "remove the folder of another cuDNN from LD_LIBRARY_PATH: torch brings its own",
        )
    if missing := [name for name in OPTIONAL if software.versions.get(name) == ""]:
        remedy = "pip install -e '.[hf,float8]' for datasets, Hugging Face comparisons and float8"
        yield Finding("note", f"not installed: {', '.join(missing)}", remedy)


def _unseen(facts: Facts, prefix: str) -> Finding:
    """Return why torch does not see the GPUs that the driver reports."""
    software = facts.software
    if not software.torch_cuda:
        remedy = "install torch with CUDA for this driver, see pytorch.org"
        return Finding("fails", f"{prefix} this torch is a build for CPUs", remedy)
    if facts.environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return Finding("fails", f"{prefix} CUDA_VISIBLE_DEVICES hides them", "unset CUDA_VISIBLE_DEVICES")
    return Finding(
        "fails",
        f"{prefix} torch, built for CUDA {software.torch_cuda}, cannot use them with driver "
        f"{software.versions.get('driver', '')}",
        "update the driver, or install a torch built for an older CUDA",
    )


def judge_trials(facts: Facts) -> Iterator[Finding]:
    """Check the results of the compile and all-reduce trials."""
    reported = not facts.software.compiler or not facts.software.python_headers  # by judge_software
    if facts.compiled.failed and not reported:
        yield Finding(
            "fails",
            f"torch.compile fails: {facts.compiled.failed}",
            "fix this error, or train without compiling: --parallel.compile.enabled=false",
        )
    if facts.all_reduce.failed:
        yield Finding(
            "fails",
            f"an all-reduce of two processes on this machine fails: {facts.all_reduce.failed}",
            "NCCL: NCCL_DEBUG=INFO prints each attempt; gloo: set its interface, GLOO_SOCKET_IFNAME=lo",
        )


def judge_folders(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each problem of the run folder (not writable, little space, slow writes) and of the
    compile cache (not writable, on a network file system)."""
    run, cache = facts.run_folder, facts.cache_folder
    if not run.writable:
        reason = f": {run.problem}" if run.problem else ""
        yield Finding("fails", f"{run.path} is not writable{reason}", "use a writable folder: --run.dir")
    if not cache.writable:
        remedy = "use a writable folder: --parallel.compile.cache_dir"
        yield Finding("fails", f"the compile cache {cache.path} is not writable", remedy)
    if isinstance(run.free_gib, float) and run.free_gib < LEAST_FREE_GIB:
        remedy = "free disk space, or use another folder: --run.dir"
        yield Finding("fails", f"{run.path} has {run.free_gib:.2f} GiB free", remedy)
    if isinstance(run.write_mb_s, float) and run.write_mb_s < SLOW_WRITE_MB_S:
        yield Finding(
            "slow",
            f"{run.path} writes {run.write_mb_s:.0f} MB/s, flushed: a checkpoint of 16 GB takes "
            f"{16000 / run.write_mb_s / 60:.1f} minutes",
            "put run.dir on a faster disk, or save less often (checkpoint.every)",
        )
    if str(cache.filesystem).startswith(NETWORK):
        remedy = "move it to a local disk: TORCHINDUCTOR_CACHE_DIR"
        yield Finding("slow", f"the compile cache {cache.path} is on {cache.filesystem}", remedy)


def judge_machine(facts: Facts) -> Iterator[Finding]:
    """Check ulimits, shared memory, memory, cores, and the host name."""
    machine, gpus = facts.machine, count_gpus(facts)
    if isinstance(machine.most_open_files, int) and machine.most_open_files < LEAST_OPEN_FILES:
        yield Finding(
            "fails",
            f"ulimit -Hn is {machine.most_open_files}; data and sockets to all peers need at least "
            f"{LEAST_OPEN_FILES}",
            "raise nofile in /etc/security/limits.conf; Docker: --ulimit nofile=65536",
        )
    if isinstance(machine.memlock_kib, int) and machine.infiniband:
        yield Finding(
            "fails",
            f"ulimit -l is {machine.memlock_kib} KiB; InfiniBand ({', '.join(machine.infiniband)}) pins more",
            "set memlock unlimited in /etc/security/limits.conf; Slurm: LimitMEMLOCK=infinity for slurmd",
        )
    if isinstance(machine.shm_gib, float) and machine.shm_gib < LEAST_SHM_GIB:
        yield Finding(
            "fails" if gpus > 1 else "note",
            f"/dev/shm has {machine.shm_gib * 1024:.0f} MiB free; NCCL on several GPUs needs more",
            "docker --shm-size=16g; Kubernetes: an emptyDir of medium Memory, as in "
            "configs/launch/kubernetes.yaml",
        )
    amounts = [value for value in (machine.available_gib, machine.cgroup_gib) if isinstance(value, float)]
    if amounts and min(amounts) < LEAST_MEMORY_GIB:
        yield Finding(
            "slow",
            f"{min(amounts):.1f} GiB of memory are available; torch and its compiler need up to "
            f"{LEAST_MEMORY_GIB:.0f}",
            "raise the container's limit, or end other programs",
        )
    if isinstance(machine.cores, int) and 0 < machine.cores < 2 * gpus:
        yield Finding(
            "slow",
            f"{machine.cores} cores for {gpus} GPUs: each process needs one to launch kernels and one to "
            "load and save",
            "request more (Slurm: --exclusive; Kubernetes: resources.limits.cpu)",
        )
    yield from _judge_name(facts)


def _judge_name(facts: Facts) -> Iterator[Finding]:
    """Check that the host name resolves, and to an address that other machines reach."""
    name, addresses = f"the host name {facts.machine.hostname}", facts.machine.addresses
    if isinstance(addresses, Unknown):
        remedy = "add it to /etc/hosts; torchrun and gloo resolve it"
        yield Finding("slow", f"{name} does not resolve: {addresses.unknown}", remedy)
    elif "GLOO_SOCKET_IFNAME" not in facts.environment and all(
        ip_address(address).is_loopback for address in addresses
    ):
        yield Finding(
            "note",
            f"{name} resolves to {addresses[0]}: other machines cannot reach gloo at this address",
            "for several machines set GLOO_SOCKET_IFNAME, such as eth0; configs/launch/nodes.sh finds it",
        )


def judge_gpus(facts: Facts) -> Iterator[Finding]:
    """Check the GPUs' power limits, and NVLink between the GPUs of this machine."""
    for number, gpu in enumerate(() if isinstance(facts.gpus, Unknown) else facts.gpus):
        limit, default = gpu.power_limit_w, gpu.default_power_limit_w
        if limit and default and limit < 0.98 * default:
            remedy = f"if this is not intended: nvidia-smi -i {number} -pl {default:.0f}"
            yield Finding("slow", f"GPU {number} is limited to {limit:.0f} W of {default:.0f} W", remedy)
    if isinstance(facts.topology, tuple) and (slow := find_slow_pairs(facts.topology)):
        yield Finding(
            "slow",
            f"no NVLink between {', '.join(slow[:4])}{' and others' if len(slow) > 4 else ''}",
            "keep tensor parallelism off these pairs (parallel.tp=1): every layer waits for its all-reduces",
        )


def find_slow_pairs(topology: Sequence[str]) -> list[str]:
    """Return the pairs of GPUs in `nvidia-smi topo -m` without NVLink (NV and a number) between them."""
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
    """Check for variables that cost speed or override a setting."""
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
    # a list is valid: one number per level of nested regions (OpenMP 5.2, 21.2.1)
    if not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", threads):
        yield Finding(
            "slow",
            f"OMP_NUM_THREADS={threads} is not a number of threads: OpenMP ignores it, with a warning from "
            "every process",
            "set OMP_NUM_THREADS=1, or unset it and set run.threads",
        )
    if environment.get("NCCL_DEBUG") in ("INFO", "TRACE"):
        yield Finding(
            "note",
            f"NCCL_DEBUG={environment['NCCL_DEBUG']} prints many lines per rank",
            "NCCL_DEBUG=WARN prints errors only",
        )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if name in environment and "expandable_segments:True" not in environment[name]:
            yield Finding(
                "note",
                f"{name}={environment[name]} switches run.expandable_segments off",
                f"add expandable_segments:True, or unset {name}",
            )


def choose_shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that can affect a run."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(SHOWN)}
