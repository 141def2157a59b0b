"""`python -m tools.dryrun --config X --gpus N`: the CUDA program of one rank, run on a fake H100."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshwright.parallel.planner.hardware import load_hardware, machines_of_kind
from meshwright.tools.cli import (
    add_config_option,
    add_node_option,
    new_parser,
    parse_with_keys,
    positive,
    run_tool,
)
from meshwright.tools.dryrun.install import SIZE, install, run_program
from meshwright.tools.dryrun.report import FIRST, as_text, make_document, read_dry_run
from meshwright.tools.plan.report import make_report
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError

DEFAULT_CACHE = "~/.cache/meshwright/fake-h100"
DESCRIPTION = """examples:
  python -m tools.dryrun --config llama_8b.yaml --gpus 8
  python -m tools.dryrun --config llama_70b.yaml --gpus 64 --parallel.tp=8 --all

Run the CUDA program of rank 0 on a fake H100, and print what it does in a step: kernel launches, host waits,
allocations, collectives, the bytes, registers and spills of each kernel, and the memory of torch's
allocator beside the predicted one. Needs no GPU, but Linux on x86-64 and g++. The model, the plan, FSDP2, the
compiler, Triton and the allocator are real; NVIDIA's libraries are replaced.
"""
LIMITS = f"""It cannot show times (nothing is computed), values (losses are 0), the kernels that NVIDIA's
libraries choose, and memory beside the allocator. With --parallel.plan=auto the planner chooses as for
h100-sxm. parallel.float8 needs torchao.
The first call downloads torch's CUDA build ({SIZE}). See docs/dryrun.md.
"""
GPU = "h100-sxm"  # of configs/hardware: what the fake is


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse arguments, run, print. Raises ConfigError and PlanError before anything is downloaded."""
    options, of_config = parse_with_keys(make_parser(), arguments)
    job = parse_config(of_config).job
    if options.keep:
        check_empty(options.keep)
    report = make_report(job, machines_of_kind(load_hardware()[GPU], options.gpus, options.gpus_per_node))
    gpu = install(Path(options.cache).expanduser().absolute(), show)
    show("planned; the first step compiles, which takes a minute for a large model")
    with tempfile.TemporaryDirectory(prefix="dryrun-") as temporary:
        scratch = Path(options.keep or temporary).absolute()
        scratch.mkdir(parents=True, exist_ok=True)
        run_program(gpu, scratch, report.plan, of_config, show)
        run = read_dry_run(scratch)
    if options.json:
        print(json.dumps(make_document(run, report), indent=2))
    else:
        print(as_text(run, report, None if options.all else FIRST))


def show(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def check_empty(folder: Path) -> None:
    """Raise ConfigError if a folder has files, which a run would mix with its own."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--keep={folder}: is not an empty folder: name a new one")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's options; config keys are parsed separately."""
    parser = new_parser("dryrun", "--config X --gpus N [--section.key=value ...]", DESCRIPTION, LIMITS)
    add = parser.add_argument
    add_config_option(parser)
    add("--gpus", required=True, type=positive, metavar="N", help="processes of the run, one per GPU")
    add_node_option(parser)
    add("--all", action="store_true", help=f"show every kernel, not only the first {FIRST}")
    add(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the log, the traces and the compiled code in this new folder (default: delete them)",
    )
    add(
        "--cache",
        default=DEFAULT_CACHE,
        metavar="FOLDER",
        help=f"where torch's CUDA build and the fake libraries are installed (default {DEFAULT_CACHE})",
    )
    add(
        "--json",
        action="store_true",
        help="one JSON document: launches, launches_by_library, host_waits, device_allocations, both "
        "by kind too, host_waits_at, copies, collectives {op, axis, bytes, stream}, "
        "totals per op, axis, kernels {name, library, calls, bytes, share, registers, spills}, "
        "launches_of_unknown_bytes, graphs (the kernels of each compiled graph, in order), "
        "peak_memory_gib, reserved_memory_gib, predicted {the same two}, plan, reasons, notes",
    )
    return parser


if __name__ == "__main__":
    run_tool(main)
