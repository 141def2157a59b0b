"""`python -m meshwright.tools.bench.calibrate.worker`: one process of a calibration, which
`calibrate` starts and reads."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.memory_breakdown import GIB
from meshwright.tools.bench.calibrate.measure import (
    CPU_SCALE,
    CPU_SIZES_BYTES,
    GPU_SCALE,
    GPU_SIZES_BYTES,
    QUICK_SIZES_BYTES,
    measure_collectives,
    measure_compute,
    quicker,
)
from meshwright.train.config import RunConfig
from meshwright.train.distributed.exit import end_process
from meshwright.train.distributed.process_group import start_process
from meshwright.train.distributed.ranks import choose_device, read_rank_info
from meshwright.train.memory import peak_resident_bytes


def main() -> None:
    """Measure one part; every rank writes FOLDER/RANK.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("compute", "collectives"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    place = read_rank_info()
    config = RunConfig(threads=1)
    device, _ = choose_device(config, place)
    start_process(config, place, device)
    try:
        measure = compute if options.part == "compute" else collectives
        found = measure(device, options.quick)
    finally:
        dist.destroy_process_group()
    (options.folder / f"{place.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    end_process(0)


def compute(device: torch.device, quick: bool) -> dict[str, Any]:
    """One device, while the other processes do the same on theirs."""
    scale = CPU_SCALE if device.type == "cpu" else GPU_SCALE
    found = {"taken_gib": taken_gib(device)}  # first: before anything else is in memory
    dist.barrier()
    return found | measure_compute(device, quicker(scale) if quick else scale)


def collectives(device: torch.device, quick: bool) -> dict[str, Any]:
    """All processes together."""
    sizes = CPU_SIZES_BYTES if device.type == "cpu" else GPU_SIZES_BYTES
    timings = measure_collectives(device, QUICK_SIZES_BYTES if quick else sizes)
    return {"timings": [dataclasses.asdict(timing) for timing in timings]}


def taken_gib(device: torch.device) -> float:
    """Memory that this process has taken before a model is made: of the GPU, or resident, once the compiler
    has run."""
    torch.compile(lambda x: x + 1)(torch.ones(8, device=device))
    if device.type == "cpu":
        return peak_resident_bytes() / GIB
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / GIB


if __name__ == "__main__":
    main()
