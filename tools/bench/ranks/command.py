"""Count what start-up and resume of thousands of ranks cost each rank: store operations, connections, files,
CPU seconds; and measure how long ranks outlive a dead one."""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.bench.harness import BenchResult, Measurement
from meshwright.tools.bench.ranks.dead_rank import measure_dead_rank
from meshwright.tools.bench.ranks.resume import ResumeCost, count_resume, write_manifest
from meshwright.tools.bench.ranks.startup import (
    PhaseCost,
    count_connections,
    count_groups,
    count_rendezvous,
    predict_connections,
)
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError

RANKS = (1024, 4096)
MOST_RANKS = 2**14  # by the memory of their threads, and the size of a manifest
CONNECTED_WORLDS = (8, 16, 32, 64)  # whose ranks really connect, in one process
# The aims for the resume of a rank of Llama 405B
MOST_FILES, MOST_METADATA_BYTES, MOST_CPU_S = 64, 20e6, 2.0
FOLDER_BYTES = 2**30  # for headers, and for a page of each tensor
PROCESSES = 2
HELD_PROCESSES = 4  # real ones, of which one is killed
RESUMED = ("FSDP", "HSDP", "FSDP x TP")  # meshes whose resume is counted
Figures = dict[str, Any]


def default_folder() -> str:
    """Return a folder in memory, if there is one with enough space. On a disk the kernel reads ahead in a
    mapped file, which is CPU time of the payload."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > FOLDER_BYTES:
        return str(memory)
    return tempfile.gettempdir()


def add_ranks_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ranks`."""
    add = parser.add_argument
    text = f"world sizes (default {' '.join(map(str, RANKS))})"
    add("--ranks", type=positive, nargs="+", default=list(RANKS), metavar="N", help=text)
    text = "config of the model that is resumed (default %(default)s)"
    add("--config", default="llama_405b", metavar="NAME", help=text)
    text = "parent of the temporary folder for sparse files: in memory, not on a disk (default %(default)s)"
    add("--folder", type=Path, default=Path(default_folder()), metavar="DIR", help=text)


def measure_ranks(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Count everything for each world size. Raises BenchError for a size that the meshes do not divide."""
    for world_size in options.ranks:
        check_ranks(world_size)
    if not (options.folder.is_dir() and os.access(options.folder, os.W_OK)):
        raise BenchError(f"--folder {options.folder} is no folder that this process can write: name another")
    figures: Figures = {"config": options.config, "ranks": {}}
    with _workers() as workers:
        counts = list(workers.map(count_connections, CONNECTED_WORLDS))
        connections = {
            group: dict(zip(CONNECTED_WORLDS, (count[group] for count in counts), strict=True))
            for group in counts[0]
        }
        figures["connections_counted"] = connections
        for world_size in options.ranks:
            print(f"{world_size:,} ranks: start-up", file=sys.stderr, flush=True)
            start = {
                "rendezvous": workers.submit(count_rendezvous, world_size).result(),
                "connections_predicted": {
                    group: predict_connections(world_size, counted) for group, counted in connections.items()
                },
                "meshes": start_figures(workers, world_size),
            }
            print(f"{world_size:,} ranks: resume", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="meshwright-bench-", dir=options.folder) as name:
                resume = resume_figures(workers, world_size, options.config, Path(name))
            figures["ranks"][str(world_size)] = {"start": start, "resume": resume}
    figures["dead_rank"] = {"processes": HELD_PROCESSES, **measure_dead_rank(HELD_PROCESSES)}
    return BenchResult(None, figures, ranks_text(figures))


@contextmanager
def _workers() -> Iterator[ProcessPoolExecutor]:
    """Start processes without a process group; they end with the context."""
    # torch warns of the default group's backends when a group with its fake backend ends
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as workers:
        yield workers


def check_ranks(world_size: int) -> None:
    """Raise BenchError unless the meshes divide this number of ranks, and half of it."""
    if world_size > MOST_RANKS:
        raise BenchError(f"--ranks {world_size}: each is a thread of one process, of at most {MOST_RANKS}")
    degree = _inner_degree(world_size)
    if world_size % (2 * degree**2):
        raise BenchError(
            f"--ranks {world_size} must be a multiple of {2 * degree**2}: its meshes have axes of degree "
            f"{degree} and are halved"
        )


def meshes(world_size: int) -> dict[str, MeshPlan]:
    """Return the counted meshes by name."""
    inner = _inner_degree(world_size)
    outer = world_size // inner
    return {
        "FSDP": MeshPlan(1, world_size, 1),
        "HSDP": MeshPlan(inner, outer, 1),
        "FSDP x TP": MeshPlan(1, outer, inner),
        "HSDP x TP": MeshPlan(inner, outer // inner, inner),
    }


def _inner_degree(world_size: int) -> int:
    return 8 if world_size >= 128 else 2


def start_figures(workers: ProcessPoolExecutor, world_size: int) -> Figures:
    """Return the cost of each phase of a start by mesh, for a rank in the middle."""
    counting = {
        kind: workers.submit(count_groups, mesh, world_size // 2, "cuda")
        for kind, mesh in meshes(world_size).items()
    }
    figures: Figures = {}
    for kind, future in counting.items():
        phases = future.result()
        figures[kind] = {
            "phases": {phase: asdict(cost) for phase, cost in phases.items()},
            "total": total_of(phases.values()),
        }
    return figures


def total_of(costs: Iterable[PhaseCost]) -> dict[str, float]:
    """Return the sums over phases: operations and bytes of the store, and the other figures."""
    everything = list(costs)
    return {
        "store_operations": sum(sum(cost.store_operations.values()) for cost in everything),
        "store_bytes": sum(cost.set_bytes + cost.got_bytes for cost in everything),
        **{
            figure: sum(getattr(cost, figure) for cost in everything)
            for figure in ("descriptors", "store_connections", "groups", "cpu_s")
        },
    }


def resume_figures(workers: ProcessPoolExecutor, world_size: int, config: str, folder: Path) -> Figures:
    """Return the cost of a resume by mesh, onto the same mesh and onto half of its ranks: of each figure the
    largest of the first, a middle and the last rank."""
    saved = {kind: mesh for kind, mesh in meshes(world_size).items() if kind in RESUMED}
    written = {
        kind: workers.submit(write_manifest, folder / f"{number}", config, mesh)
        for number, (kind, mesh) in enumerate(saved.items())
    }
    counting = {}
    for kind, mesh in saved.items():
        checkpoint = written[kind].result()
        half = MeshPlan(mesh.dp_replicate, mesh.dp_shard // 2, mesh.tp)
        for target, onto in (("same", mesh), ("half", half)):
            sampled = (0, onto.world_size // 2, onto.world_size - 1)
            counting[kind, target] = [
                workers.submit(count_resume, checkpoint, config, onto, rank) for rank in sampled
            ]
    figures: Figures = {kind: {} for kind in saved}
    for (kind, target), futures in counting.items():
        figures[kind][target] = largest([future.result() for future in futures])
    return figures


def largest(costs: Sequence[ResumeCost]) -> Figures:
    """Return the largest of each figure, and whether all are within the aims."""
    figures: Figures = {name: max(getattr(cost, name) for cost in costs) for name in asdict(costs[0])}
    within = (
        figures["files"] <= MOST_FILES
        and figures["metadata_bytes"] <= MOST_METADATA_BYTES
        and figures["cpu_s"] <= MOST_CPU_S
    )
    return {**figures, "within": within}


def ranks_text(figures: Figures) -> str:
    """Return the figures as tables, and which of them are predicted."""
    starts, resumes = list[list[str]](), list[list[str]]()
    for world_size, counted in figures["ranks"].items():
        starts += start_rows(int(world_size), counted["start"])
        resumes += [
            [f"{int(world_size):,}", kind, target, *_resume_cells(cost)]
            for kind, targets in counted["resume"].items()
            for target, cost in targets.items()
        ]
    model = (
        f"resume of {figures['config']}, for a rank: the largest figures of the first, a middle and the last"
    )
    aims = f"aims: {MOST_FILES} files, {MOST_METADATA_BYTES / 1e6:g} MB, {MOST_CPU_S:g} s of CPU"
    missed = [" ".join(row[:3]) for row in resumes if row[-1] == "no"]
    return "\n\n".join(
        [
            "start-up, for a rank on GPUs; predicted: MB of all ranks, connections (default + stop group)",
            format_table(START_HEAD, starts),
            f"{model}; the values themselves are not read",
            format_table(RESUME_HEAD, resumes),
            f"{aims}: {'missed by ' + ', '.join(missed) if missed else 'met'}",
            "{processes} processes with main threads that cannot return, one is killed: the others end after "
            "{first_s:.1f} to {last_s:.1f} s".format(**figures["dead_rank"]),
        ]
    )


START_HEAD = (
    "ranks",
    "mesh",
    "store operations",
    "of rank 0",
    "store bytes",
    "all ranks' MB",
    "groups",
    "descriptors",
    "connections",
    "CPU ms",
)
RESUME_HEAD = ("ranks", "mesh", "onto", "files", "metadata MB", "CPU s", "payload GB", "within the aims")


def start_rows(world_size: int, start: Figures) -> list[list[str]]:
    """Return a row for each mesh: the rendezvous and the phases together."""
    rendezvous, rows = start["rendezvous"], []
    first, other = rendezvous["rank_0"], rendezvous["other_ranks"]
    for kind, mesh in start["meshes"].items():
        total = mesh["total"]
        all_bytes = rendezvous["all_ranks"]["bytes"] + world_size * total["store_bytes"]
        rows.append(
            [
                f"{world_size:,}",
                kind,
                f"{other['store_operations'] + total['store_operations']:,}",
                f"{first['store_operations'] + total['store_operations']:,}",
                f"{other['bytes'] + total['store_bytes']:,}",
                f"{all_bytes / 1e6:.1f}",
                f"{total['groups']:,}",
                f"{total['descriptors'] + total['store_connections']:,}",
                " + ".join(map(str, start["connections_predicted"].values())),
                f"{total['cpu_s'] * 1e3:.0f}",
            ]
        )
    return rows


def _resume_cells(cost: Figures) -> list[str]:
    return [
        f"{cost['files']:,}",
        f"{cost['metadata_bytes'] / 1e6:.1f}",
        f"{cost['cpu_s']:.2f}",
        f"{cost['payload_bytes'] / 1e9:.1f}",
        "yes" if cost["within"] else "no",
    ]


MEASUREMENT = Measurement(
    "ranks",
    add_ranks_options,
    measure_ranks,
    summary="start-up and resume of thousands of ranks, by counting",
    description=(
        "Run the code of a start and of a resume of thousands of ranks in two processes, and count what it "
        "costs a rank: operations and bytes of the rendezvous store, process groups, descriptors, files "
        "opened, metadata read, CPU seconds. The rendezvous runs all ranks, as threads with one store. "
        "Groups are created as one rank of the world: gloo's are real and connect when they are used, NCCL's "
        "are replaced by torch's fake backend, so NCCL's own traffic is not counted. A resume reads a "
        "checkpoint with a real manifest and real headers, whose tensors are holes in sparse files, into "
        "tensors without memory. At the end one of four real processes is killed. Takes two to four minutes."
    ),
    takes_keys=False,
)
