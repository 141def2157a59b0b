"""The captures that come with the package: what a search for a plan of each Llama in configs/ can have to
trace, on GPUs, and for the laptop's on CPUs.

    python -m benchmarks.captures            trace all of them again, and list the stale ones: some minutes
    python -m benchmarks.captures --write    write configs/captures, of this version of torch
"""

import argparse
import lzma
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from meshwright.models.config import LlamaConfig
from meshwright.parallel.config import Dtype
from meshwright.parallel.planner.hardware import load_hardware, machines_of_kind
from meshwright.train.config_parser import list_configs, parse_config
from meshwright.train.files import write_atomically
from meshwright.train.planning.captures import TraceCase, find_capture, shipped_key, shipped_path
from meshwright.train.planning.predict import cases_of_search
from meshwright.train.planning.trace_model import trace_case

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)  # tp up to the 8 of a node, cp up to 16
ON_CPU: dict[str, tuple[Dtype, ...]] = {"llama_debug": ("float32", "bfloat16")}


def llamas() -> list[str]:
    """Return the names of the configs whose captures come with the package."""
    stems = [path.stem for path in list_configs()]
    return [stem for stem in stems if isinstance(parse_config([f"--config={stem}"]).model, LlamaConfig)]


def cases_of_config(name: str, ranks: int) -> Iterator[TraceCase]:
    """Yield the cases of a search for a plan of a config for a number of processes."""
    job = parse_config([f"--config={name}"]).job
    yield from cases_of_search(job, machines_of_kind(load_hardware()["h100-sxm"], ranks, 8))
    for dtype in ON_CPU.get(name, ()):
        of_dtype = replace(job, parallel=replace(job.parallel, param_dtype=dtype))
        yield from cases_of_search(of_dtype, machines_of_kind(load_hardware()["cpu"], ranks, 8))


def is_stale(case: TraceCase) -> bool:
    """Whether the package lacks a case, or has another workload for it than this code traces."""
    return find_capture(None, case) != trace_case(case)


def cases_by_file() -> dict[Path, list[TraceCase]]:
    """Return all cases that come with the package, by the file that has them."""
    every = {case: None for ranks in RANKS for name in llamas() for case in cases_of_config(name, ranks)}
    files = dict[Path, list[TraceCase]]()
    for case in every:
        files.setdefault(shipped_path(case.model), []).append(case)
    return files


def write_file(path: Path, cases: Sequence[TraceCase]) -> None:
    """Trace the cases of a file and write it, byte by byte the same as long as the workloads are."""
    works = {shipped_key(case): msgspec.Raw(msgspec.json.encode(trace_case(case))) for case in cases}
    content = msgspec.json.encode(dict(sorted(works.items())))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lzma.compress(content, preset=lzma.PRESET_EXTREME | 9))


def main() -> None:
    """Write the captures, or list those that are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write, stale = parser.parse_args().write, list[TraceCase]()
    for path, cases in cases_by_file().items():
        if write:
            write_file(path, cases)
        else:
            stale += filter(is_stale, cases)
        print(f"{path.name}: {len(cases)} cases", flush=True)
    sys.exit("\n".join(["stale:", *map(repr, stale)]) if stale else 0)


if __name__ == "__main__":
    main()
