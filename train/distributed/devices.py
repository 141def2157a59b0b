"""The device of this process, and the comparison of all ranks' devices before they communicate."""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from meshwright.parallel.errors import PlanError
from meshwright.train.config import RunConfig
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.hang_diagnosis import as_ranges

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
    """Return the index of the GPU of this process, None for the CPU. Raises PlanError.

    One GPU in `visible`, the value of CUDA_VISIBLE_DEVICES, is this process's own: srun --gpus-per-task and
    Ray give each process one. If the user gave the same one to all, `compare_processes` finds it.

    Args:
        requested: run.device
        gpus: the number of GPUs that this process sees
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
    """What the ranks compare before they communicate.

    Args:
        host: name of the machine
        device: cpu or cuda
        gpu: name of the GPU; "" on a CPU
        gpu_uuid: identity of the GPU; "" on a CPU, and where it is unknown
        torch: version of torch
    """

    host: str
    device: str
    gpu: str = ""
    gpu_uuid: str = ""
    torch: str = torch.__version__


@dataclass(frozen=True)
class Comparison:
    """Why the ranks cannot train together, and a warning; "" for none."""

    error: str = ""
    warning: str = ""


def read_facts(device: torch.device) -> ProcessFacts:
    """Return the facts of this process."""
    host = socket.gethostname()
    if device.type == "cpu":
        return ProcessFacts(host, "cpu")
    gpu = torch.cuda.get_device_properties(device)
    # slices of one GPU (MIG) may show its uuid
    uuid = "" if " MIG " in gpu.name else str(getattr(gpu, "uuid", ""))
    return ProcessFacts(host, device.type, gpu.name, uuid)


def compare_texts(facts: Sequence[str]) -> str:
    """`compare_processes` for texts of JSON."""
    return json.dumps(asdict(compare_processes([ProcessFacts(**json.loads(fact)) for fact in facts])))


def compare_processes(facts: Sequence[ProcessFacts]) -> Comparison:
    """Compare the facts of all ranks, in their order: kind of device, version of torch, one GPU for each
    process, and the GPUs' names.

    The default group has other backends on a CPU than on a GPU, so that the first collective of unlike ranks
    would hang.
    """
    if odd := _odd_ranks(facts, [KINDS.get(fact.device, fact.device) for fact in facts]):
        way_out = "repair or allocate the missing GPUs (nvidia-smi), or start all ranks with --run.device=cpu"
        return Comparison(f"all ranks need the same kind of device, but {odd}: {way_out}")
    if odd := _odd_ranks(facts, [f"torch {fact.torch}" for fact in facts]):
        return Comparison(f"all ranks need the same version of torch, but {odd}: install it on every host")
    if shared := _shared_gpu(facts):
        return Comparison(
            f"every process needs a GPU of its own, but {shared}: start the processes with all GPUs of the "
            f"host visible, or each with its own {VISIBLE}"
        )
    odd = _odd_ranks(facts, [fact.gpu for fact in facts])
    return Comparison(warning=f"warning: the ranks have different GPUs: {odd}" if odd else "")


def _odd_ranks(facts: Sequence[ProcessFacts], values: Sequence[str]) -> str:
    """Return which ranks have another value than most ranks (in a tie, than rank 0), and what most have; ""
    if all values are equal."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: counts[value])  # of equal counts the first: that of rank 0
    if len(counts) == 1:
        return ""
    odd = [
        f"{_describe(facts, (rank for rank, other in enumerate(values) if other == value))} {value}"
        for value in counts
        if value != usual
    ]
    others = _describe(facts, (rank for rank, value in enumerate(values) if value == usual))
    return f"{', '.join(odd)}, and {others} {usual}"


def _describe(facts: Sequence[ProcessFacts], ranks: Iterable[int]) -> str:
    """Return a subject and its verb, such as "rank 3 (host b) has"."""
    chosen = list(ranks)
    hosts = list(dict.fromkeys(facts[rank].host for rank in chosen))
    shown = ", ".join(hosts[:MOST_HOSTS]) + (", ..." if len(hosts) > MOST_HOSTS else "")
    nouns = "rank" if len(chosen) == 1 else "ranks", "host" if len(hosts) == 1 else "hosts"
    verb = "has" if len(chosen) == 1 else "have"
    return f"{nouns[0]} {as_ranges(chosen)} ({nouns[1]} {shown}) {verb}"


def _shared_gpu(facts: Sequence[ProcessFacts]) -> str:
    """Return the ranks of the first GPU that several have, or ""."""
    by_gpu: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        if fact.gpu_uuid:
            by_gpu.setdefault(fact.gpu_uuid, []).append(rank)
    shared = [(uuid, ranks) for uuid, ranks in by_gpu.items() if len(ranks) > 1]
    return "".join(
        f"{_describe(facts, ranks)} the same one, {facts[ranks[0]].gpu} {uuid}" for uuid, ranks in shared[:1]
    )
