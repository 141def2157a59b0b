"""Measure this machine with the processes of a run, at the sizes of its model: for `parallel.plan=auto` and
`tools.plan --gpu here`."""

import contextlib
import dataclasses
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.parallel.compile.apply import cache_folder
from meshwright.parallel.planner.hardware import Hardware, find_hardware, load_hardware, read_hardware
from meshwright.parallel.structure import structure
from meshwright.parallel.yaml_io import YamlError, load_value
from meshwright.train.calibration.collectives import time_collectives
from meshwright.train.calibration.compute import (
    AttentionShape,
    Products,
    Scale,
    combine,
    device_model,
    measure_compute,
)
from meshwright.train.calibration.hardware_file import Calibration, hardware_text
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.agreement import broadcast_from_rank0, gather_from_all
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.files import write_atomically
from meshwright.train.model.trained_model import AttentionHeads, TrainedModel, model_of
from meshwright.train.planning.resolve import dtype_on_device

HERE = "this machine"  # name of a kind that measured itself
FALLBACK = {"cpu": "cpu", "cuda": "h100-sxm"}  # kinds from which the rest is copied
BUDGET_S = 0.1  # seconds of repetition of each measurement
MOST_FLOPS = 4e9  # of one measured product or attention, so that a slow CPU needs less than a second
MOST_SEQUENCES = 8  # of a measured micro batch, if the planner chooses it
ROTATED_BYTES = 2**26
GIVEN_BYTES = (2**14, 2**17, 2**20, 2**22)  # of collectives, besides those of the model's blocks


def measure_here(
    job: TrainingJob, ranks: RankInfo, device: torch.device, say: Callable[[str], None]
) -> tuple[Hardware, Path, str]:
    """Return this machine as it is kept from an earlier measurement at the sizes of the job, or measured now
    by all processes of the run, which all call this; the file that keeps it; and a line that says which.
    `say` is told before a measurement, which takes a while."""
    path = kept_path(job, ranks.local_world_size, torch.get_num_threads(), device)
    if kept := broadcast_from_rank0(ranks, lambda: read_kept(path)):
        return kept, path, broadcast_from_rank0(ranks, lambda: _describe_age(path))
    say(f"measuring this machine with {ranks.local_world_size} processes, up to a minute")
    started_at, known = time.perf_counter(), find_hardware(device_model(device))
    scale = job_scale(job, ranks.local_world_size, device)
    measured = measure_machine(device, scale, ranks.local_world_size, has_mfu=known is not None)
    took_s = time.perf_counter() - started_at
    base = known or load_hardware()[FALLBACK[device.type]]
    hardware = broadcast_from_rank0(ranks, lambda: _keep(path, measured, base))
    return hardware, path, f"measured this machine for {took_s:.0f} s; kept in {path}"


def measure_machine(
    device: torch.device,
    scale: Scale,
    local_processes: int,
    most_loaded: int = sys.maxsize,
    has_mfu: bool = True,
) -> Calibration:
    """Measure the devices, then collectives between the processes of a node. All processes call this; those
    beyond the first `most_loaded` only take part in collectives."""
    dist.barrier()
    computes = dist.get_rank() < most_loaded
    of_ranks = gather_from_all(measure_compute(device, scale) if computes else None)
    compute = [rates for rates in of_ranks if rates]
    return Calibration(
        device.type,
        device_model(device),
        usable_cores() if device.type == "cpu" else 0,
        len(compute),
        combine(compute, lambda _, values: statistics.median(values)),
        time_collectives(device, local_processes, scale.collectives_bytes, scale.budget_s),
        has_mfu,
    )


def job_scale(job: TrainingJob, local_processes: int, device: torch.device) -> Scale:
    """Return the sizes of the job's own operations, without and with tensor parallelism, and for the smallest
    and the largest micro batch, if the planner chooses them."""
    requested = job.parallel.param_dtype
    dtype = dtype_on_device(device) if requested == "auto" else requested
    model = model_of(job.model)
    block = max(model.units.modules[name] for name in model.units.checkpointed)
    sequences, degrees = _micro_batches(job, local_processes), _tp_degrees(job, local_processes)
    tokens = [n * job.seq_len for n in sequences]
    products = {p for t in tokens for tp in degrees for p in _products(model, t, tp)}
    block_bytes = [block * width for width in (getattr(torch, dtype).itemsize, 4)]
    return Scale(
        products=sorted({_shortened(product) for product in products}),
        attention=[_attention(model, sequences[-1], job.seq_len)],
        memory=(min(tokens[-1], 4096), *_widths(model)),
        dtypes=(dtype,),
        collectives_bytes=tuple(sorted({*GIVEN_BYTES, *(min(size, 2**25) for size in block_bytes)})),
        budget_s=BUDGET_S,
        rotated_bytes=ROTATED_BYTES,
    )


def _micro_batches(job: TrainingJob, processes: int) -> list[int]:
    if isinstance(job.micro_batch_size, int):
        return [job.micro_batch_size]
    share = job.global_batch_size // processes if job.global_batch_size > 0 else MOST_SEQUENCES
    return sorted({1, max(1, min(share, MOST_SEQUENCES))})


def _tp_degrees(job: TrainingJob, processes: int) -> list[int]:
    if isinstance(job.parallel.tp, int):
        return [job.parallel.tp]
    sizes = [size for part in model_of(job.model).units.tp_divides.values() for size in part.values()]
    return [1, 2] if processes % 2 == 0 and sizes and not any(size % 2 for size in sizes) else [1]


def _products(model: TrainedModel, tokens: int, tp: int) -> Iterator[Products]:
    """Yield the linear layers of a block, and the head: tokens, inputs, outputs. Those that make the model's
    width from another are split over their inputs, the others over their outputs."""
    dim, _ = _widths(model)
    for inputs, outputs in model.linears:
        if inputs == dim:
            yield tokens, inputs, max(1, outputs // tp)
        else:
            yield tokens, max(1, inputs // tp), outputs


def _widths(model: TrainedModel) -> tuple[int, int]:
    """Return the width of the model, which most of its linear layers read, and that of its feed-forward."""
    inputs = [inputs for inputs, _ in model.linears]
    dim = max(inputs, key=inputs.count)
    return dim, max((each for each in inputs if each != dim), default=dim)


def _shortened(product: Products) -> Products:
    """Return the product with fewer tokens if it would take too long."""
    tokens, inputs, outputs = product
    return min(tokens, max(1, int(MOST_FLOPS / (2 * inputs * outputs)))), inputs, outputs


def _attention(model: TrainedModel, sequences: int, seq_len: int) -> AttentionShape:
    """Return the model's attention, with fewer sequences and then shorter ones if it would take too long. One
    that is not known has heads of 64 channels."""
    heads = model.attention
    if heads is None:
        count = max(1, _widths(model)[0] // 64)
        heads = AttentionHeads(count, count, 64)

    def flops(batch: int, length: int) -> float:
        return 4.0 * batch * heads.heads * heads.head_dim * length**2

    while sequences > 1 and flops(sequences, seq_len) > MOST_FLOPS:
        sequences //= 2
    while flops(sequences, seq_len) > MOST_FLOPS:
        seq_len //= 2
    return AttentionShape(sequences, heads.heads, heads.kv_heads, heads.head_dim, seq_len)


def kept_path(job: TrainingJob, local_processes: int, threads: int, device: torch.device) -> Path:
    """Return the file that keeps the measurements: one for each machine, version of torch, number of
    processes and of their threads, and sizes."""
    scale = job_scale(job, local_processes, device)
    facts = (device_model(device), usable_cores(), local_processes, threads, scale, torch.__version__)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    return cache_folder(job.parallel.compile) / f"hardware-{key[:16]}.yaml"


def read_kept(path: str | Path) -> Hardware | None:
    """Return kept measurements; None if there are none, or those of another version of this project."""
    try:
        return dataclasses.replace(read_hardware(Path(path)), name=HERE)
    except (OSError, YamlError):
        return None


def _keep(path: Path, measured: Calibration, base: Hardware) -> Hardware:
    """Write the measurements, unless the folder cannot be written, and return them as they are read."""
    title = f"{measured.name}, measured by its own processes for parallel.plan=auto."
    text = hardware_text(title, measured, base)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    hardware: Hardware = structure(Hardware, {**load_value(text), "name": HERE}, str(path))
    return hardware


def _describe_age(path: Path) -> str:
    measured_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    return f"this machine as it measured itself on {measured_at}; delete {path} to measure it again"
