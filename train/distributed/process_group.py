"""Process setup of a rank: limits, threads and cores, device, GPU allocator, and the process group, for which
all ranks compare their devices before they communicate."""

import json
import logging
import math
import os
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as launcher_rendezvous

from meshwright.parallel.errors import PlanError
from meshwright.parallel.machine_memory import keep_freed_memory, own_groups, read_text
from meshwright.train.config import RunConfig
from meshwright.train.distributed.agreement import check_same_settings
from meshwright.train.distributed.ranks import RankInfo, as_ranges
from meshwright.train.errors import ConfigError
from meshwright.train.files import allow_open_files

VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_HOSTS = 4  # named in a message
KINDS = {"cpu": "the CPU", "cuda": "a GPU"}


def choose_device(config: RunConfig, ranks: RankInfo) -> tuple[torch.device, str]:
    """Return the device of this process, and the GPU's name or why the CPU is used. Raises PlanError if there
    are fewer GPUs than local processes, unless `run.device` is cpu, or auto on a machine without GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = gpu_index(config.device, gpus, ranks, os.environ.get(VISIBLE))
    if index is None:
        return torch.device("cpu"), f"CPU ({'requested' if config.device == 'cpu' else 'no GPU'})"
    device = torch.device("cuda", index)
    return device, torch.cuda.get_device_name(device)


def gpu_index(requested: str, gpus: int, ranks: RankInfo, visible: str | None) -> int | None:
    """Return the index of the GPU of this process, which sees so many `gpus`; None for the CPU. `requested`:
    run.device. Raises PlanError.

    One GPU in `visible`, the value of CUDA_VISIBLE_DEVICES, is this process's own: srun --gpus-per-task and
    Ray give each process one. If the user gave the same one to all, `compare_processes` finds it.
    """
    if requested == "cpu" or (requested == "auto" and not gpus):
        return None
    if gpus == 1 and visible:
        return 0
    processes = ranks.local_world_size
    if gpus < processes:
        only = f" ({VISIBLE}={visible})" if visible is not None else ""
        fewer = f"start {gpus} process{'es' * (gpus > 1)} per node, or " if gpus else ""
        raise PlanError(
            f"run.device={requested} needs a GPU for each of {processes} local processes, but "
            f"{socket.gethostname()} shows {gpus} GPU{'s' * (gpus != 1)}{only}: {fewer}use --run.device=cpu"
        )
    return ranks.local_rank


@dataclass(frozen=True)
class ProcessFacts:
    """What the ranks compare before they communicate. `gpu`, the GPU's name, and `gpu_uuid` are "" on a CPU,
    the second also where it is unknown."""

    host: str
    device: str
    gpu: str = ""
    gpu_uuid: str = ""
    torch: str = torch.__version__


def read_facts(device: torch.device) -> ProcessFacts:
    host = socket.gethostname()
    if device.type == "cpu":
        return ProcessFacts(host, "cpu")
    gpu = torch.cuda.get_device_properties(device)
    # slices of one GPU (MIG) may show its uuid
    uuid = "" if " MIG " in gpu.name else str(getattr(gpu, "uuid", ""))
    return ProcessFacts(host, device.type, gpu.name, uuid)


def compare_texts(facts: Sequence[str]) -> str:
    """`compare_processes` for texts of JSON."""
    return json.dumps(compare_processes([ProcessFacts(**json.loads(fact)) for fact in facts]))


def compare_processes(facts: Sequence[ProcessFacts]) -> tuple[str, str]:
    """Compare the facts of all ranks, in their order: kind of device, version of torch, one GPU for each
    process, and the GPUs' names. Returns why they cannot train together, and a warning; "" for none.

    The default group has other backends on a CPU than on a GPU, so that the first collective of unlike ranks
    would hang.
    """
    if odd := _odd_ranks(facts, [KINDS.get(fact.device, fact.device) for fact in facts]):
        way_out = "repair or allocate the missing GPUs (nvidia-smi), or start all ranks with --run.device=cpu"
        return f"all ranks need the same kind of device, but {odd}: {way_out}", ""
    if odd := _odd_ranks(facts, [f"torch {fact.torch}" for fact in facts]):
        return f"all ranks need the same version of torch, but {odd}: install it on every host", ""
    if shared := _shared_gpu(facts):
        return (
            f"every process needs a GPU of its own, but {shared}: start the processes with all GPUs of the "
            f"host visible, or each with its own {VISIBLE}"
        ), ""
    odd = _odd_ranks(facts, [fact.gpu for fact in facts])
    return "", f"warning: the ranks have different GPUs: {odd}" if odd else ""


def _ranks_by(values: Iterable[str]) -> dict[str, list[int]]:
    """Return the ranks that have each value, of all ranks' values in order."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _odd_ranks(facts: Sequence[ProcessFacts], values: Sequence[str]) -> str:
    """Return which ranks have which value, the most frequent one last, in a tie that of rank 0; "" if all
    values are equal."""
    groups = sorted(_ranks_by(values).items(), key=lambda group: (len(group[1]), 0 in group[1]))
    *odd, usual = (f"{_describe(facts, ranks)} {value}" for value, ranks in groups)
    return f"{', '.join(odd)}, and {usual}" if odd else ""


def _describe(facts: Sequence[ProcessFacts], ranks: Sequence[int]) -> str:
    """Return a subject and its verb, such as "rank 3 (host b) has"."""
    hosts = list(dict.fromkeys(facts[rank].host for rank in ranks))
    shown = ", ".join(hosts[:MOST_HOSTS]) + (", ..." if len(hosts) > MOST_HOSTS else "")
    nouns = "rank" if len(ranks) == 1 else "ranks", "host" if len(hosts) == 1 else "hosts"
    verb = "has" if len(ranks) == 1 else "have"
    return f"{nouns[0]} {as_ranges(ranks)} ({nouns[1]} {shown}) {verb}"


def _shared_gpu(facts: Sequence[ProcessFacts]) -> str:
    """Return the ranks of the first GPU that several have, or ""."""
    for uuid, ranks in _ranks_by(fact.gpu_uuid for fact in facts).items():
        if uuid and len(ranks) > 1:
            return f"{_describe(facts, ranks)} the same one, {facts[ranks[0]].gpu} {uuid}"
    return ""


# torch reads these at the first use of the allocator
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def use_expandable_segments() -> bool:
    """Let the allocator's segments grow in place; call it before the first GPU allocation. Returns False, and
    changes nothing, if one of VARIABLES is set.

    Growing segments avoid fragmentation: gaps of reserved memory that are too small for the next request.
    Sharded training fragments memory, because it gathers and frees units of different sizes all the time
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
    """
    if any(name in os.environ for name in VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def usable_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """Number of physical cores that this process may use. Hardware threads of one core count once, because a
    second thread on a core does not speed up matrix products.

    Counts the cores of `cpus`, by default the CPUs of the process's affinity, up to the container's CPU
    quota, rounded up. `root`: folder that contains /proc and /sys.
    """
    cpus = _affinity() if cpus is None else cpus
    cores = len({_thread_siblings(root, cpu) for cpu in cpus})
    return max(1, min(cores, processors(root) or cores))


def usable_threads() -> int:
    """Number of hardware threads that this process may use, for work that gains from both threads of a core,
    such as text processing."""
    return min(len(_affinity()), processors() or len(_affinity()))


def _affinity() -> Collection[int]:
    """The hardware threads on which the scheduler may run this process."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _thread_siblings(root: Path, cpu: int) -> str:
    """The hardware threads of the core of `cpu`, the same text for all; without that file `cpu` itself."""
    return read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def processors(root: Path = Path("/")) -> int | None:
    """Number of CPUs whose time the control groups allow: the smallest quota (microseconds of each period of
    so many), rounded up; None without a quota."""
    quotas = []
    for group in own_groups("cpu", root):
        version_1 = f"{read_text(group / 'cpu.cfs_quota_us')} {read_text(group / 'cpu.cfs_period_us')}"
        quota, _, period = (read_text(group / "cpu.max") or version_1).partition(" ")
        if quota.isdecimal() and period.isdecimal():  # "max", or -1 in version 1, is no quota
            quotas.append(math.ceil(int(quota) / int(period)))
    return min(quotas, default=None)


def init_process_group(backend: str, timeout: timedelta, facts: ProcessFacts | None = None) -> str:
    """Initialize the process group after a comparison of the `facts` of all ranks, and return its warning;
    without `facts` a group of one, so that the same code runs without a launcher. Raises ConfigError on all
    ranks if they cannot train together."""
    if facts is None:
        own = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=own, rank=0, world_size=1, timeout=timeout)
        return ""
    # late: a single process meets no others
    from meshwright.train.distributed.rendezvous import rendezvous, wait_until_read

    launcher_store, rank, world_size = next(launcher_rendezvous("env://", timeout=timeout))
    store, verdict = rendezvous(launcher_store, rank, world_size, json.dumps(asdict(facts)), compare_texts)
    error, warning = json.loads(verdict)
    if error:
        wait_until_read(store, rank, world_size)
        raise ConfigError(error)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return str(warning)


def group_timeout(config: RunConfig) -> timedelta:
    """Timeout of a collective: longer than any timeout of the config, so that the watchdog reports first; one
    day if one of them is 0 (no timeout)."""
    timeouts_s = astuple(config.timeouts)
    return timedelta(days=1) if 0 in timeouts_s else timedelta(seconds=max(timeouts_s) + 60)


def start_process(config: RunConfig, ranks: RankInfo, device: torch.device) -> list[str]:
    """Set limits, threads and device, and join the process group; a single process gets a group of one.
    Returns warnings about the devices of the ranks. Raises ConfigError."""
    allow_open_files()
    if device.type == "cuda":
        if config.expandable_segments:
            use_expandable_segments()
        torch.cuda.set_device(device)
    else:  # torch would warn about a CUDA toolkit without a GPU, which is not an error here
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        keep_freed_memory()
    # OMP_NUM_THREADS is ignored: torchrun sets it to 1 if it is unset.
    torch.set_num_threads(config.threads or max(1, usable_cores() // ranks.local_world_size))
    # The ranks of gloo groups connect when they first exchange data. Otherwise each connects to all others in
    # every group, and the addresses in the store grow with the square of the world size.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone = not ranks.under_torchrun and ranks.world_size == 1
    warning = init_process_group(backend, group_timeout(config), None if alone else read_facts(device))
    return [warning] if warning else []


def init_distributed(
    config: RunConfig, settings: Mapping[str, str], ranks: RankInfo, device: torch.device
) -> list[str]:
    """Join the process group, unless this process has done so, and check that all ranks have the same
    settings. Returns the warnings of `start_process`. Raises ConfigError."""
    warnings = [] if dist.is_initialized() else start_process(config, ranks, device)
    check_same_settings(ranks, settings)
    return warnings
