"""`--gpu here`: this machine as it measures itself, with as many processes as the run has on a node."""

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.parallel.compile.apply import use_cache_folder
from meshwright.parallel.planner.hardware import Hardware
from meshwright.tools.workers import run_workers
from meshwright.train.calibration.measure import measure_here, read_kept
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import read_rank_info

HERE = "here"  # instead of the name of a kind


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
        f"{__name__}:measure_in_worker", processes, threads, device, {"arguments": list(arguments)}
    )[0]
    hardware = read_kept(result["path"])
    assert hardware is not None, f"{result['path']} was written just now"
    return hardware, f"{HERE}: {result['line']}"


def measure_in_worker(device: torch.device, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure in one of the worker's processes."""
    config = parse_config(arguments)
    use_cache_folder(config.parallel.compile)
    _, path, line = measure_here(config.job, read_rank_info(), device, print)
    return {"path": str(path), "line": line}
