"""The cost of safe checkpoints compared with torch's distributed checkpoint, and how long training waits:
`python -m tests.soak.safety -h`."""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.train import config_to_record
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError, make_environment, python_command, run_to_end
from meshwright.train.config_parser import parse_config
from tests.soak.program import Measured, make_parser, run_program

MOST_SAVE, MOST_STALL = 1.15, 1.5  # limits: of torch's own save with either storage; of a normal step
DESCRIPTION = (
    "Save and load the same tensors, sharded over several processes, on one disk, alternating: with our "
    "CheckpointSaver (hashes, manifest, fsync, commit), with torch.distributed.checkpoint's safetensors "
    "storage (save_distributed), and with its own storage, which syncs its files by default; loads with the "
    "files in the page cache and without. Then train llama_debug, save while it trains, and compare steps. "
    "Takes a few minutes."
)
EPILOG = (
    "Config keys of train.main are accepted too, as --section.key=value, and win over those of both models."
)
ON_DISK = (
    "--model.dim=512",
    "--model.n_layers=8",
    "--model.n_heads=8",
    "--model.n_kv_heads=8",
    "--model.ffn_dim=1408",
    "--model.vocab_size=8192",
    "--parallel.compile.enabled=false",
)
STALLED = ("--config=llama_debug.yaml",)
STORE_GB = 0.42  # of the model with its optimizer state on disk; each of three ways keeps one


def add_safety_options(parser: argparse.ArgumentParser) -> None:
    """Add its options to those that all programs have."""
    parser.add_argument(
        "--processes", type=positive, default=2, metavar="N", help="ranks that save and load (default 2)"
    )
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="of every figure (default 7)")
    parser.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="CPU threads of each (default 1)"
    )
    parser.add_argument(
        "--folder",
        default=tempfile.gettempdir(),
        metavar="DIR",
        help="where the temporary folder is made: a disk, not memory (default %(default)s)",
    )


def check_disk_space(folder: Path, gb: float) -> None:
    """Raise BenchError if the folder does not exist or its disk has less than 1.1 x `gb` free."""
    if not folder.is_dir():
        raise BenchError(f"--folder {folder}: no such folder: create it, or use another")
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < 1.1 * gb:
        raise BenchError(
            f"--folder {folder} has {free_gb:.3g} GB free but needs {1.1 * gb:.3g}: use another disk"
        )


def measure_safety(options: argparse.Namespace, overrides: Sequence[str]) -> Measured:
    """Return configs, figures and a text. Raises BenchError, and the errors of a wrong config."""
    check_disk_space(Path(options.folder), 4 * STORE_GB)
    keys = {"disk": [*ON_DISK, *overrides], "stall": [*STALLED, *overrides]}
    configs = {kind: config_to_record(parse_config(keys[kind])) for kind in keys}
    measured = {kind: run_workers(kind, keys[kind], options) for kind in keys}
    setup = {name: getattr(options, name) for name in ("processes", "rounds", "threads")}
    figures = {
        **setup,
        "load_average": os.getloadavg()[0],
        **summarise(measured["disk"], measured["stall"]),
        "raw": measured,
    }
    return configs, figures, safety_text(figures)


def run_workers(kind: str, keys: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of tests.soak.safety_worker. Raises BenchError if it fails."""
    with tempfile.TemporaryDirectory(prefix="meshwright-safety-", dir=options.folder) as name:
        folder = Path(name)
        worker = [kind, name, str(options.rounds), *keys, f"--run.threads={options.threads}"]
        command = [
            *python_command("tests.soak.safety_worker", options.processes, folder / "torchrun"),
            *worker,
        ]
        run_to_end(command, make_environment(options.threads, {}), folder / "log", lambda: None)
        return dict(json.loads((folder / "figures.json").read_text(encoding="utf-8")))


def summarise(disk: dict[str, Any], stall: dict[str, Any]) -> dict[str, Any]:
    """Return medians and ratios. A ratio is the median of those within one round."""
    saves, steps = disk["save_s"], stall["step_s"]
    normal_s = statistics.median(steps["normal"])
    save = {way: median_ratio(saves["ours"], saves[way]) for way in saves if way != "ours"}
    loads = {
        cache: {way: statistics.median(seconds) for way, seconds in ways.items()}
        for cache, ways in disk["load_s"].items()
    }
    saving = statistics.median(steps["saving"]) / normal_s
    return {
        "size_gb": disk["size_gb"],
        "hash_gb_s": disk["hash_gb_s"],
        "save_s": {
            way: {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
            for way, seconds in saves.items()
        },
        "save_ratio_to": save,
        "load_s": loads,
        "asynchronous_s": {
            what: statistics.median(seconds) for what, seconds in disk["asynchronous_s"].items()
        },
        "normal_step_s": normal_s,
        "step_ratio": {
            "saving": saving,
            "beside writing": statistics.median(steps["beside writing"]) / normal_s,
        },
        "stall_size_gb": stall["size_gb"],
        "within": max(save.values()) <= MOST_SAVE and saving <= MOST_STALL,
    }


def median_ratio(ours: Sequence[float], other: Sequence[float]) -> float:
    """Return the median ratio of alternating measurements."""
    return statistics.median(mine / its for mine, its in zip(ours, other, strict=True))


def safety_text(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    save, steps, waits = figures["save_s"], figures["step_ratio"], figures["asynchronous_s"]
    rows = [(f"hashing: {what}", f"{rate:.2f}", "GB/s") for what, rate in figures["hash_gb_s"].items()]
    rows += [
        (f"save: {way}", f"{of['median']:.3f} ({of['min']:.3f} - {of['max']:.3f})", "s")
        for way, of in save.items()
    ]
    rows += [(f"save: ours / {way}", f"{ratio:.2f}", "") for way, ratio in figures["save_ratio_to"].items()]
    rows += [(f"asynchronous save: {what}", f"{seconds:.3f}", "s") for what, seconds in waits.items()]
    rows += [
        (f"load, {cache}: {way}", f"{seconds:.3f}", "s")
        for cache, ways in figures["load_s"].items()
        for way, seconds in ways.items()
    ]
    rows += [(f"llama_debug, step {kind} / normal step", f"{ratio:.2f}", "") for kind, ratio in steps.items()]
    lines = [
        f"{figures['size_gb']:.2f} GB over {figures['processes']} processes, {figures['rounds']} rounds; "
        f"llama_debug: {figures['stall_size_gb'] * 1e3:.0f} MB, {figures['normal_step_s']:.3f} s a step",
        f"limits: our save at most {MOST_SAVE} times torch's with either storage, a step that "
        f"saves at most {MOST_STALL} times a normal one: {'' if figures['within'] else 'NOT '}within",
    ]
    return "\n".join([format_table(("figure", "median", "unit"), rows), "", *lines])


if __name__ == "__main__":
    parser = make_parser("safety", DESCRIPTION, EPILOG)
    add_safety_options(parser)
    run_program("safety", parser, measure_safety)
