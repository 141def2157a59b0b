"""`python -m meshwright.tools.bench.worker`: one process of a measurement with several processes.
`harness.run_workers` starts them and reads their results."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.tools.bench.calibrate.command import compute_in_worker, links_in_worker
from meshwright.tools.bench.own_model.command import compare_in_worker, time_in_worker
from meshwright.tools.bench.ranks.dead_rank import hold_main_thread
from meshwright.tools.bench.speed.cpu_limits import measure_rates
from meshwright.tools.plan.here import measure_in_worker
from meshwright.train.config import RunConfig
from meshwright.train.distributed.devices import choose_device
from meshwright.train.distributed.exit import end_process
from meshwright.train.distributed.process_group import start_process
from meshwright.train.distributed.ranks import read_rank_info

PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "compute": compute_in_worker,
    "links": links_in_worker,
    "here": measure_in_worker,
    "held": hold_main_thread,
    "rates": measure_rates,
    "own_model": compare_in_worker,
    "own_llama": time_in_worker,
}


def main() -> None:
    """Measure one part. Every rank writes FOLDER/RANK.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    options = parser.parse_args()
    rank_info, config = read_rank_info(), RunConfig(threads=options.threads, device=options.device)
    device, _ = choose_device(config, rank_info)
    start_process(config, rank_info, device)
    try:
        result = PARTS[options.part](device, **options.settings)
    finally:
        dist.destroy_process_group()
    (options.folder / f"{rank_info.rank}.json").write_text(json.dumps(result), encoding="utf-8")
    end_process(0)


if __name__ == "__main__":
    main()
