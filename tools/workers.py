"""Call a function in several processes with a process group, as the ranks of a run: `run_workers`.

Each process is `python -m meshwright.tools.workers MODULE:FUNCTION ...`.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.tools.processes import make_environment, python_command, run_to_end
from meshwright.train.config import RunConfig
from meshwright.train.distributed.exit import end_process
from meshwright.train.distributed.process_group import choose_device, start_process
from meshwright.train.distributed.ranks import read_rank_info


def run_workers(
    function: str, processes: int, threads: int, device: str, settings: Mapping[str, Any]
) -> list[Any]:
    """Return the result of each rank, as JSON keeps it, of a function MODULE:FUNCTION of the rank's device
    and the settings. `threads`: of each process on a CPU. Raises BenchError if a process fails."""
    with tempfile.TemporaryDirectory(prefix="meshwright-workers-") as name:
        folder = Path(name)
        command = [
            *python_command("meshwright.tools.workers", processes, folder / "torchrun"),
            function,
            f"--folder={folder}",
            f"--threads={threads}",
            f"--device={device}",
            f"--settings={json.dumps(settings)}",
        ]
        run_to_end(command, make_environment(threads, {}), folder / "log", lambda: None)
        files = [folder / f"{rank}.json" for rank in range(processes)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def main() -> None:
    """Call the function in this process, and write its result to FOLDER/RANK.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("function")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    options = parser.parse_args()
    module, _, name = options.function.partition(":")
    ranks, config = read_rank_info(), RunConfig(threads=options.threads, device=options.device)
    device, _ = choose_device(config, ranks)
    start_process(config, ranks, device)
    try:
        result = getattr(import_module(module), name)(device, **options.settings)
    finally:
        dist.destroy_process_group()
    (options.folder / f"{ranks.rank}.json").write_text(json.dumps(result), encoding="utf-8")
    end_process(0)


if __name__ == "__main__":
    main()
