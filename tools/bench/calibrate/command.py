"""Measure this machine, GPU or CPU, and write a hardware file for the planner."""

import argparse
from collections.abc import Sequence

import torch

from meshwright.parallel.planner.hardware import (
    HARDWARE_FOLDER,
    Hardware,
    find_hardware,
    load_hardware,
    read_hardware,
)
from meshwright.tools.bench import harness
from meshwright.tools.bench.calibrate.hardware_file import (
    CalibratedMachine,
    CalibrationResult,
    cpu_values,
    gpu_values,
    hardware_text,
)
from meshwright.tools.bench.calibrate.measure import CollectiveTiming
from meshwright.tools.bench.harness import BenchResult, Measurement, run_workers
from meshwright.tools.plan.report import find_kind
from meshwright.tools.processes import BenchError

CPU_RANKS = (2, 4)
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
    machine = find_machine(options.quick)
    base = find_base(options.base, machine)
    result = measure(machine)
    values = (
        cpu_values(machine, result, base) if machine.device == "cpu" else gpu_values(machine, result, base)
    )
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
    }
    return BenchResult(None, figures, f"{text}\nwritten: {path}")


def find_machine(quick: bool) -> CalibratedMachine:
    """Return this machine's GPUs, or its CPU if there are none, as in training."""
    if torch.cuda.is_available():
        return CalibratedMachine("cuda", torch.cuda.get_device_name(0), torch.cuda.device_count(), quick)
    hardware = harness.find_hardware()
    return CalibratedMachine("cpu", hardware["cpu"], hardware["cores"], quick)


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


def measure(machine: CalibratedMachine) -> CalibrationResult:
    """Measure computation, then collectives, in separate processes. Raises BenchError if one fails."""
    if machine.device == "cpu":
        processes, ranks = min(MOST_LOADED, machine.count), set(CPU_RANKS)
    else:
        processes, ranks = 1, {2, machine.count} if machine.count > 1 else set()
    settings = {"quick": machine.quick}
    compute = run_workers("compute", processes, 1, machine.device, settings)
    timings = [
        CollectiveTiming(**row)
        for n in sorted(ranks)
        for row in run_workers("collectives", n, 1, machine.device, settings)[0]["timings"]
    ]
    return CalibrationResult(compute, timings)


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
