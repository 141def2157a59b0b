"""Checks shardings that are right: tiny models of ten families, sharded as people do it with plain torch,
transformers and accelerate. A difference that `tools.check` finds there is a false alarm."""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from benchmarks.legal.pairs import PAIRS, Pair
from benchmarks.support.forked_ranks import RankError, run_forked
from benchmarks.support.harness import BenchResult, Measurement, run_benchmark
from meshwright.parallel.check.compare import compare_recorded
from meshwright.parallel.check.foreign import Subject, record_rank, record_twin
from meshwright.parallel.check.recorded import RankRecord
from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.processes import BenchError

# imported once, before the ranks are forked
PRELOADED = (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "sympy", "safetensors.torch"),
    *("torch.distributed.tensor.parallel", "transformers.distributed.mixin", "transformers.modeling_utils"),
)
ONE_RANK = {"dp_replicate": 1, "dp_shard": 1, "tp": 1}


def records(subject: Subject) -> list[RankRecord]:
    """Return on rank 0 what all ranks record. Every rank calls it."""
    own = record_rank(subject)
    found: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, found if dist.get_rank() == 0 else None)
    return found


def judged(subject: Subject, ranks: Sequence[RankRecord]) -> CheckReport:
    """Return the report of ranks beside one process."""
    return compare_recorded(subject.mesh, record_twin(subject, ranks), ranks)


def try_pair(pair: Pair) -> dict[str, Any]:
    """Check a pair on ranks that are forked, and return its row."""
    start = time.perf_counter()
    subject = Subject(pair.build, pair.shard, MeshPlan(**ONE_RANK | pair.degrees))
    row: dict[str, Any] = {"pair": pair.name, "fault": pair.fault}
    try:
        report = run_forked(1, judged, subject, run_forked(subject.mesh.world_size, records, subject))
    except RankError as error:
        return row | {"right": False, "report": str(error), "seconds": time.perf_counter() - start}
    kinds = [each.kind for each in report.differences]
    right = any(pair.fault in kind for kind in kinds) if pair.fault else report.same
    return row | {
        "right": right,
        "compared": report.compared,
        "largest": report.largest,
        "hints": report.hints,
        "report": str(report) if pair.fault or not right else "",
        "seconds": time.perf_counter() - start,
    }


def try_all(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Check the pairs whose names contain all given words. Raises BenchError if there are none."""
    chosen = [pair for name, pair in PAIRS.items() if all(word in name for word in options.words)]
    if not chosen:
        raise BenchError(f"no pair has {' and '.join(options.words)} in its name: {'; '.join(PAIRS)}")
    for module in PRELOADED:
        importlib.import_module(module)
    rows = []
    for pair in chosen:
        rows.append(row := try_pair(pair))
        print(line_of(row), file=sys.stderr, flush=True)
    return BenchResult(None, {"rows": rows}, markdown(rows))


def line_of(row: dict[str, Any]) -> str:
    """Return a line for a pair, and the report of one that is not right."""
    report = f"\n{row['report']}" if row["report"] and not row["right"] else ""
    return f"{row['pair']}: {result_of(row)}, {row['seconds']:.1f} s{report}"


def result_of(row: dict[str, Any]) -> str:
    if not row["right"]:
        return "**not found**" if row["fault"] else "**false alarm**"
    hints = "".join(f"; {hint}" for hint in row["hints"] if hint.startswith("nothing"))
    return (
        "fault found"
        if row["fault"]
        else f"the same, {row['largest']:.1e} of {row['compared']} tensors{hints}"
    )


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table, and the number of false alarms."""
    lines = ["| model, sharding, mesh | what check says | seconds |", "|---|---|---|"]
    lines += [f"| {row['pair']} | {result_of(row)} | {row['seconds']:.1f} |" for row in rows]
    legal = [row for row in rows if not row["fault"]]
    alarms = sum(not row["right"] for row in legal)
    found = sum(row["right"] for row in rows if row["fault"])
    seconds = sum(row["seconds"] for row in rows)
    lines += ["", f"{alarms} false alarms in {len(legal)} legal pairs; {seconds:.0f} s"]
    if faults := len(rows) - len(legal):
        lines.append(f"{found} of {faults} faults found")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="in the names of the pairs; all if none is given"
    )


MEASUREMENT = Measurement(
    "legal_shardings",
    add_options,
    try_all,
    description=(
        "Check tiny models of ten families, sharded with fully_shard, DDP and parallelize_module, and by "
        "transformers and accelerate. What differs is a false alarm, except known faults of theirs."
    ),
    takes_keys=False,
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
