"""Measure this machine, GPU or CPU, and write a hardware file for the planner."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.planner.hardware import (
    HARDWARE_FOLDER,
    Hardware,
    find_hardware,
    load_hardware,
    read_hardware,
)
from meshwright.tools.bench import harness
from meshwright.tools.bench.harness import BenchResult, Measurement, run_workers
from meshwright.tools.plan.report import find_kind
from meshwright.tools.processes import BenchError
from meshwright.train.calibration.collectives import CollectiveTiming
from meshwright.train.calibration.compute import CPU_SCALE, GPU_SCALE, Scale, measure_compute, quicker
from meshwright.train.calibration.hardware_file import (
    CalibratedMachine,
    CalibrationResult,
    hardware_text,
    measured_values,
)
from meshwright.train.calibration.host import UnitTiming
from meshwright.train.calibration.measure import measure_links

LINKED_CPU_RANKS = 4  # processes between which collectives are measured, also in pairs
# processes that measure a CPU at the same time: they share only the memory bandwidth, which 4 saturate
MOST_LOADED = 4
CPU_BASE = "cpu"


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `calibrate`."""
    add = parser.add_argument
    add("--name", required=True, metavar="NAME", help="write configs/hardware/NAME.yaml")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    text = (
        "hardware file from which to copy what cannot be measured on one machine, such as the network "
        "between nodes (default: the file of this device)"
    )
    add("--base", metavar="KIND", help=text)
    add("--quick", action="store_true", help="fewer sizes and repeats, to test the command")


def calibrate(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Measure this machine and write the file.

    Raises BenchError and ConfigError for wrong options before measuring, and BenchError if a process fails.
    """
    path = HARDWARE_FOLDER / f"{options.name}.yaml"
    if path.exists() and not options.overwrite:
        raise BenchError(f"{path} exists: use --overwrite to replace it, or another --name")
    machine = find_machine("--quick" if options.quick else "")
    base = find_base(options.base, machine)
    result = measure(machine, options.quick)
    values = measured_values(machine, result, base)
    text = hardware_text(f"{machine.name}, measured by `python -m tools.bench calibrate`.", values)
    if options.name == base.name:  # the base is replaced: do not refer to it
        text = text.replace(f"# as in {path.name}: ", "# ")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    read_hardware(path)
    figures = {
        "file": path.name,
        "compute": list(result.compute),
        "timings": [vars(timing) for timing in result.timings],
        "units": [vars(timing) for timing in result.units],
    }
    return BenchResult(None, figures, f"{text}\nwritten: {path}")


def find_machine(note: str) -> CalibratedMachine:
    """Return this machine's GPUs, or its CPU if there are none, as in training."""
    if torch.cuda.is_available():
        return CalibratedMachine("cuda", torch.cuda.get_device_name(0), torch.cuda.device_count(), note=note)
    hardware = harness.find_hardware()
    return CalibratedMachine("cpu", hardware["cpu"], hardware["cores"], note=note)


def find_base(name: str | None, machine: CalibratedMachine) -> Hardware:
    """Return the hardware file to copy values from. Raises BenchError and ConfigError."""
    if name is not None:
        return find_kind(name, "--base")
    kinds = load_hardware()
    base = kinds.get(CPU_BASE) if machine.device == "cpu" else find_hardware(machine.name)
    if base is None:
        raise BenchError(
            f"{machine.name}: no file in configs/hardware describes this device: name one from which to copy "
            f"what cannot be measured: --base {' | '.join(kinds)}"
        )
    return base


def measure(machine: CalibratedMachine, quick: bool) -> CalibrationResult:
    """Measure computation, then collectives, in separate processes. Raises BenchError if one fails."""
    if machine.device == "cpu":
        processes, linked = min(MOST_LOADED, machine.count), LINKED_CPU_RANKS
    else:
        processes, linked = 1, machine.count
    settings = {"quick": quick}
    compute = run_workers("compute", processes, 1, machine.device, settings)
    links = run_workers("links", linked, 1, machine.device, settings)[0]
    return CalibrationResult(
        compute,
        [CollectiveTiming(**timing) for timing in links["timings"]],
        [UnitTiming(**timing) for timing in links["units"]],
    )


def compute_in_worker(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measure the rates of one device."""
    return measure_compute(device, _scale(device, quick))


def links_in_worker(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measure collectives and FSDP2 between all processes."""
    timings, units = measure_links(device, _scale(device, quick), dist.get_world_size())
    return {"timings": [vars(timing) for timing in timings], "units": [vars(timing) for timing in units]}


def _scale(device: torch.device, quick: bool) -> Scale:
    scale = CPU_SCALE if device.type == "cpu" else GPU_SCALE
    return quicker(scale) if quick else scale


MEASUREMENT = Measurement(
    "calibrate",
    add_calibrate_options,
    calibrate,
    summary="measure this machine for the planner",
    description=(
        "Measure matrix products by size and dtype, attention, memory bandwidth, the overhead of an "
        "operation, and collectives between 2 and 4 processes (gloo) or this node's GPUs (NCCL), and write a "
        f"hardware file for the planner. A CPU's rates are per process, with one process per core but at "
        f"most {MOST_LOADED}. It takes about two minutes; run nothing else meanwhile."
    ),
    takes_keys=False,
)
