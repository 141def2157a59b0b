"""`python -m tools.calibrate --name NAME`: measure this machine and write a hardware file for the
planner; and `tools.plan --gpu here`: measure it at the sizes of a run."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.compile.apply import use_cache_folder
from meshwright.parallel.planner.hardware import (
    HARDWARE_FOLDER,
    Hardware,
    find_hardware,
    load_hardware,
    read_hardware,
)
from meshwright.tools.cli import new_parser, run_tool, to_json
from meshwright.tools.plan.report import find_kind
from meshwright.tools.processes import BenchError
from meshwright.tools.workers import run_workers
from meshwright.train.calibration.compute import device_model
from meshwright.train.calibration.measure import (
    hardware_text,
    job_scale,
    measure_here,
    measure_machine,
    read_kept,
)
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import read_rank_info

HERE = "here"  # instead of the name of a kind
PLACE = "meshwright.tools.calibrate"  # of the functions that workers call; this file may be __main__
LINKED_CPU_RANKS = 4  # processes between which collectives are measured, also in pairs
# processes that measure a CPU at the same time: they share only the memory bandwidth, which 4 saturate
MOST_LOADED = 4
CPU_BASE = "cpu"
DESCRIPTION = f"""examples:
  python -m tools.calibrate --name mine
  python -m tools.calibrate --name mine --overwrite --base h100-sxm

Measure matrix products and attention by dtype, memory bandwidth, the host's
costs of launching, and collectives between 2 and 4 processes (gloo) or
this node's GPUs (NCCL), and write a hardware file for the planner. A CPU's
rates are per process, with one process per core but at most {MOST_LOADED}. It takes
about a minute; run nothing else meanwhile.
"""
# arguments of train.main, of the model at whose sizes a device is measured
MODELS = {
    "cpu": ("--config=llama_debug.yaml", "--model.dim=512", "--model.ffn_dim=1536"),
    "cuda": ("--config=llama_8b.yaml",),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this machine, write the file, and print it.

    Raises BenchError and ConfigError for wrong options before measuring, and BenchError if a process fails.
    """
    options = make_parser().parse_args(arguments)
    path = HARDWARE_FOLDER / f"{options.name}.yaml"
    if path.exists() and not options.overwrite:
        raise BenchError(f"{path} exists: use --overwrite to replace it, or another --name")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # as in training
    base = find_base(options.base, device.type, device_model(device))
    processes = LINKED_CPU_RANKS if device.type == "cpu" else torch.cuda.device_count()
    settings = {"base": base.name}
    result = run_workers(f"{PLACE}:measure_in_worker", processes, 1, device.type, settings)[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result["text"], encoding="utf-8")
    read_hardware(path)
    if options.json:
        print(to_json({"file": path.name, "measured": result["measured"]}))
    else:
        print(f"{result['text']}\nwritten: {path}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's options."""
    parser = new_parser("calibrate", "--name NAME", DESCRIPTION)
    add = parser.add_argument
    add("--name", required=True, metavar="NAME", help="write configs/hardware/NAME.yaml")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    text = (
        "hardware file from which to copy what cannot be measured on one machine, such as the network "
        "between nodes (default: the file of this device)"
    )
    add("--base", metavar="KIND", help=text)
    add("--json", action="store_true", help="print what was measured as one JSON document, not the file")
    return parser


def find_base(base: str | None, device: str, name: str) -> Hardware:
    """Return the hardware file to copy values from. Raises BenchError and ConfigError."""
    if base is not None:
        return find_kind(base, "--base")
    kinds = load_hardware()
    found = kinds.get(CPU_BASE) if device == "cpu" else find_hardware(name)
    if found is None:
        raise BenchError(
            f"{name}: no file in configs/hardware describes this device: name one from which to copy what "
            f"cannot be measured: --base {' | '.join(kinds)}"
        )
    return found


def measure_in_worker(device: torch.device, base: str) -> dict[str, Any]:
    """Measure in one of the worker's processes. Returns the hardware file, and what was measured."""
    most_loaded = min(MOST_LOADED, usable_cores()) if device.type == "cpu" else 1
    job, processes = parse_config(MODELS[device.type]).job, dist.get_world_size()
    scale = replace(job_scale(job, processes, device), dtypes=("float32", "bfloat16"))
    measured = measure_machine(device, scale, processes, most_loaded)
    title = f"{measured.name}, measured by `python -m tools.calibrate`."
    text = hardware_text(title, measured, load_hardware()[base])
    return {"text": text, "measured": asdict(measured)}


def measure_this_machine(
    arguments: Sequence[str], processes: int, threads: int = 0, device: str = "auto"
) -> tuple[Hardware, str]:
    """Measure this machine at the sizes of a run, or take what is kept from an earlier measurement. Returns
    it with the line that says how old the measurements are.

    Args:
        arguments: of train.main
        processes: of the run on this machine
        threads: of each process on a CPU; 0: its share of the cores, as in a run

    Raises BenchError if a process fails.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = threads or max(1, usable_cores() // processes)
    result = run_workers(
        f"{PLACE}:measure_run_in_worker", processes, threads, device, {"arguments": list(arguments)}
    )[0]
    hardware = read_kept(result["path"])
    assert hardware is not None, f"{result['path']} was written just now"
    return hardware, f"{HERE}: {result['line']}"


def measure_run_in_worker(device: torch.device, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure in one of the worker's processes."""
    config = parse_config(arguments)
    use_cache_folder(config.parallel.compile)
    _, path, line = measure_here(config.job, read_rank_info(), device, print)
    return {"path": str(path), "line": line}


if __name__ == "__main__":
    run_tool(main)
