"""Measure this machine with the processes of a run, at the sizes of its model: for `parallel.plan=auto` and
`tools.plan --gpu here`."""

import contextlib
import dataclasses
import datetime
import hashlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.compile.apply import cache_folder
from meshwright.parallel.machine_memory import memory_limit_bytes
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.mesh import gather_from_all
from meshwright.parallel.planner.hardware import (
    Hardware,
    HostCosts,
    Link,
    find_hardware,
    load_hardware,
    read_hardware,
)
from meshwright.parallel.structure import structure
from meshwright.parallel.yaml_io import YamlError, load_value, to_yaml
from meshwright.train.calibration.collectives import Seconds, time_collectives
from meshwright.train.calibration.compute import (
    AttentionShape,
    Products,
    Scale,
    combine,
    device_model,
    measure_compute,
)
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.agreement import broadcast_from_rank0
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.files import write_atomically
from meshwright.train.model.trained_model import AttentionHeads, TrainedModel, model_of
from meshwright.train.planning.resolve import dtype_on_device

HERE = "this machine"  # name of a kind that measured itself
FALLBACK = {"cpu": "cpu", "cuda": "h100-sxm"}  # kinds from which the rest is copied
BUDGET_S = 0.1  # seconds of repetition of each measurement
# of one measured product or attention, so that it takes less than a second
MOST_FLOPS = {"cpu": 4e9, "cuda": 4e12}
MOST_BYTES = {"cpu": 2**25, "cuda": 2**30}  # of a measured collective
# more than the last-level cache: 32 MiB on a server's core complex, 50 MiB on an H100
ROTATED_BYTES = {"cpu": 2**26, "cuda": 2**28}
MOST_SEQUENCES = 8  # of a measured micro batch, if the planner chooses it
GIVEN_BYTES = (2**14, 2**17, 2**20, 2**22)  # of collectives, besides those of the model's blocks
DIGITS = 4  # significant digits: more than repeated measurements agree on


@dataclass(frozen=True)
class Calibration:
    """A measured machine.

    Args:
        device, name: torch's device type, and the device's name
        cores: of a CPU, which the processes share; 0 if each has its own device
        processes: that measured `compute` at the same time
        compute: the result of measure_compute, medians over the processes
        collectives_s: seconds of collectives; empty for a single process
        has_mfu: whether the peak of this GPU is known
    """

    device: str
    name: str
    cores: int
    processes: int
    compute: Mapping[str, Any]
    collectives_s: Seconds
    has_mfu: bool = True


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
    """Return the sizes of the job's own operations, for the largest micro batch if the planner chooses it."""
    requested = job.parallel.param_dtype
    dtype = dtype_on_device(device) if requested == "auto" else requested
    model = model_of(job.model)
    block = max(model.units.modules[name] for name in model.units.checkpointed)
    sequences = _most_sequences(job, local_processes)
    tokens = sequences * job.seq_len
    block_bytes = [block * width for width in (getattr(torch, dtype).itemsize, 4)]
    return Scale(
        products=sorted({_shortened((tokens, *layer), device) for layer in model.linears}),
        attention=_attention(model, sequences, job.seq_len, MOST_FLOPS[device.type]),
        memory=(min(tokens, 4096), *_widths(model)),
        dtypes=(dtype,),
        collectives_bytes=tuple(
            sorted({*GIVEN_BYTES, *(min(size, MOST_BYTES[device.type]) for size in block_bytes)})
        ),
        budget_s=BUDGET_S,
        rotated_bytes=ROTATED_BYTES[device.type],
    )


def _most_sequences(job: TrainingJob, processes: int) -> int:
    if isinstance(job.micro_batch_size, int):
        return job.micro_batch_size
    share = job.global_batch_size // processes if job.global_batch_size > 0 else MOST_SEQUENCES
    return max(1, min(share, MOST_SEQUENCES))


def _widths(model: TrainedModel) -> tuple[int, int]:
    """Return the width of the model, which most of its linear layers read, and that of its feed-forward."""
    inputs = [inputs for inputs, _ in model.linears]
    dim = max(inputs, key=inputs.count)
    return dim, max((each for each in inputs if each != dim), default=dim)


def _shortened(product: Products, device: torch.device) -> Products:
    """Return the product with fewer tokens if it would take too long."""
    tokens, inputs, outputs = product
    return min(tokens, max(1, int(MOST_FLOPS[device.type] / (2 * inputs * outputs)))), inputs, outputs


def _attention(model: TrainedModel, sequences: int, seq_len: int, most_flops: float) -> AttentionShape:
    """Return the model's attention, with fewer sequences and then shorter ones if it would take too long. One
    that is not known has heads of 64 channels."""
    heads = model.attention
    if heads is None:
        count = max(1, _widths(model)[0] // 64)
        heads = AttentionHeads(count, count, 64)

    def flops(batch: int, length: int) -> float:
        return 4.0 * batch * heads.heads * heads.head_dim * length**2

    while sequences > 1 and flops(sequences, seq_len) > most_flops:
        sequences //= 2
    while flops(sequences, seq_len) > most_flops:
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
    hardware: Hardware = structure(Hardware, {**load_value(text), "name": HERE, "correction": 1.0}, str(path))
    return hardware


def _describe_age(path: Path) -> str:
    measured_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    return f"this machine as it measured itself on {measured_at}; delete {path} to measure it again"


def hardware_text(title: str, measured: Calibration, base: Hardware) -> str:
    """Return the text of the hardware file of a machine; what was not measured is that of `base`."""
    values = measured_values(measured, base)
    others = {key: value for key, value in vars(base).items() if key not in ("name", "correction", *values)}
    lines = [title, f"Measured {datetime.date.today()}, torch {torch.__version__}, {measured.name}."]
    if measured.device == "cpu":
        lines.append(f"Rates are those of one core, with {measured.processes} processes that compute.")
    if copied := sorted(base.matmul.keys() - measured.compute["matmul"].keys()):
        lines.append(f"{', '.join(copied)}: as in {base.name}.yaml, memory_efficiency as measured.")
    lines.append(f"As in {base.name}.yaml: {', '.join(others)}.")
    comments = "".join(f"# {line}\n" for line in lines)
    # None writes collections of scalars on one line
    return comments + to_yaml(_plain({**values, **others}), default_flow_style=None, width=math.inf)


def measured_values(measured: Calibration, base: Hardware) -> dict[str, Any]:
    """Return the measured keys of Hardware. Of a dtype that was not measured the base has the shares of its
    peak, and the measured one stands for its memory bandwidth."""
    compute = measured.compute
    if measured.device == "cpu":
        bytes_s = compute["copy_bytes_s"]
        peaks = {**base.peak_tflops, **{d: rate / 1e12 for d, rate in compute["matmul"].items()}}
        values = _cpu_values(measured, peaks, bytes_s)
    else:
        bytes_s, peaks = 1e9 * base.memory_gb_s, dict(base.peak_tflops)
        values = {
            "device_names": [measured.name] if measured.has_mfu else [],
            "memory_gib": torch.cuda.get_device_properties(0).total_memory / GIB,
        }
    products, attention = dict(base.matmul), {name: dict(of) for name, of in base.attention.items()}
    for dtype, rate in compute["matmul"].items():
        products[dtype] = rate / 1e12 / peaks[dtype]
        best = zip(compute["attention"][dtype], base.attention_shares("", dtype), strict=True)
        forward, backward = (rate / 1e12 / peaks[dtype] / share for rate, share in best)  # times the base's
        for shares in attention.values():
            if dtype in shares:
                shares[dtype] = shares[dtype][0] * forward, shares[dtype][1] * backward
    moved = {dtype: rate / bytes_s for dtype, rate in compute["memory_bytes_s"].items()}
    unmeasured = dict.fromkeys(base.memory_efficiency, next(iter(moved.values())))
    slower = compute["operator_s"] / base.host.operator_s  # than the base's host, in graphs and FSDP2 too
    return values | {
        "matmul": products,
        "attention": attention,
        "memory_efficiency": {**unmeasured, **moved},
        "copy_efficiency": compute["copy_bytes_s"] / bytes_s,
        "optimizer_efficiency": compute["optimizer_bytes_s"] / bytes_s,
        "host": HostCosts(**{name: cost * slower for name, cost in vars(base.host).items()}),
        "reserved_gib": compute["taken_gib"],
        "reached": 1.0,
        "collectives_s": measured.collectives_s,
    }


def _cpu_values(measured: Calibration, peaks: Mapping[str, float], copy_bytes_s: float) -> dict[str, Any]:
    """Return what only a CPU has measured: its peak and its bandwidth are its rates. It has no MFU."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device_names": [],
        "memory_gib": min(total, memory_limit_bytes() or total) / GIB,
        "memory_gb_s": copy_bytes_s / 1e9,
        "host_gb_s": copy_bytes_s / 1e9,
        "peak_tflops": peaks,
        "cores": measured.cores,
    }


def _plain(value: Any) -> Any:
    """Return a value as plain YAML data, floats with DIGITS significant digits."""
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case Link() | HostCosts():
            return _plain(vars(value))
        case Mapping():
            return {key: _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value
