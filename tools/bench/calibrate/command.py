"""Measures the machine at hand, GPU or CPU, and writes what it is as a hardware file for the planner."""

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
    Found,
    cpu_values,
    gpu_values,
    hardware_text,
)
from meshwright.tools.bench.calibrate.measure import CollectiveTiming
from meshwright.tools.bench.harness import BenchResult, Measurement, run_workers
from meshwright.tools.plan.report import find_kind
from meshwright.tools.processes import BenchError

CPU_RANKS = (2, 4)
MOST_LOADED = 4  # processes that measure a CPU at once: more share nothing but memory bandwidth, which 4 fill
CPU_BASE = "cpu"


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    """Options of `calibrate`."""
    add = parser.add_argument
    add("--name", required=True, metavar="NAME", help="write configs/hardware/NAME.yaml")
    add("--overwrite", action="store_true", help="the file may exist already")
    words = (
        "kind of machine to take over from what cannot be measured here, such as the network between nodes "
        "(default: the kind that this device is)"
    )
    add("--base", metavar="KIND", help=words)
    add("--quick", action="store_true", help="fewer sizes and repeats: to try it out")


def calibrate(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Measure, and write the file. Raises BenchError before anything is measured."""
    path = HARDWARE_FOLDER / f"{options.name}.yaml"
    if path.exists() and not options.overwrite:
        raise BenchError(f"{path} exists. Give --overwrite to replace it, or another --name")
    machine = find_machine(options.quick)
    base = find_base(options.base, machine)
    found = measure(machine)
    values = cpu_values(machine, found, base) if machine.device == "cpu" else gpu_values(machine, found, base)
    text = hardware_text(f"{machine.name}, measured by `python -m tools.bench calibrate`.", values)
    if options.name == base.name:  # the file that is replaced: its own source says it
        text = text.replace(f"# as in {path.name}: ", "# ")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    read_hardware(path)
    figures = {
        "file": path.name,
        "compute": list(found.compute),
        "timings": [vars(timing) for timing in found.timings],
    }
    return BenchResult(None, figures, f"{text}\nwritten: {path}")


def find_machine(quick: bool) -> CalibratedMachine:
    """GPUs where there are any, as in training."""
    if torch.cuda.is_available():
        return CalibratedMachine("cuda", torch.cuda.get_device_name(0), torch.cuda.device_count(), quick)
    hardware = harness.find_hardware()
    return CalibratedMachine("cpu", hardware["cpu"], hardware["cores"], quick)


def find_base(name: str | None, machine: CalibratedMachine) -> Hardware:
    """The kind to take over from. Raises BenchError and ConfigError."""
    if name is not None:
        return find_kind(name, "--base")
    kinds = load_hardware()
    base = kinds.get(CPU_BASE) if machine.device == "cpu" else find_hardware(machine.name)
    if base is None:
        raise BenchError(
            f"{machine.name} is of no known kind: name one to take over what cannot be measured here, with "
            f"--base {' | '.join(kinds)}"
        )
    return base


def measure(machine: CalibratedMachine) -> Found:
    """Start the processes that measure, one part after the other. Raises BenchError if one fails."""
    if machine.device == "cpu":
        together, ranks = min(MOST_LOADED, machine.count), set(CPU_RANKS)
    else:
        together, ranks = 1, {2, machine.count} if machine.count > 1 else set()
    settings = {"quick": machine.quick}
    compute = run_workers("compute", together, 1, machine.device, settings)
    timings = [
        CollectiveTiming(**row)
        for n in sorted(ranks)
        for row in run_workers("collectives", n, 1, machine.device, settings)[0]["timings"]
    ]
    return Found(compute, timings)


MEASUREMENT = Measurement(
    "calibrate",
    add_calibrate_options,
    calibrate,
    summary="measure this machine, for the planner",
    description=(
        "Measure products by size and dtype, attention, memory bandwidth, the cost of an operation, and "
        "collectives between 2 and 4 processes (gloo) or this node's GPUs (NCCL), and write a hardware file "
        "for the planner. A CPU's rates are those of one process while as many run as there are cores. Takes "
        "about two minutes; nothing else should run meanwhile."
    ),
    takes_keys=False,
)
