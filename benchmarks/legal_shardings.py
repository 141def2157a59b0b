"""Checks shardings that are right: tiny models of ten families, sharded as people do it with plain torch,
transformers and accelerate. A difference that `tools.check` finds there is a false alarm."""

import argparse
import importlib
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.legal.pairs import BY_HAND, FULL, PAIRS, THEIRS, Pair, pairs_of_every_model
from benchmarks.support.forked_ranks import RankError, run_forked
from benchmarks.support.harness import BenchResult, Measurement, run_benchmark
from meshwright.parallel.check.compare import compare_recorded
from meshwright.parallel.check.foreign import record_rank, record_twin
from meshwright.parallel.check.recorded import RankRecord
from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.check.subject import Subject
from meshwright.parallel.mesh import gather_from_all
from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.processes import BenchError

# imported once, before the ranks are forked
PRELOADED = (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "sympy", "safetensors.torch"),
    *("torch.distributed.tensor.parallel", "transformers.distributed.mixin", "transformers.modeling_utils"),
)
ONE_RANK = {"dp_replicate": 1, "dp_shard": 1, "tp": 1}


def records(subject: Subject) -> list[RankRecord]:
    """Return what all ranks record. Every rank calls it."""
    return gather_from_all(record_rank(subject))


def judged(subject: Subject, ranks: Sequence[RankRecord]) -> CheckReport:
    """Return the report of ranks beside one process."""
    return compare_recorded(subject.mesh, record_twin(subject, ranks), ranks)


def subject_of(pair: Pair, folder: Path) -> Subject:
    """Return what check is given. `folder`: for a loop's checkpoint."""
    return Subject(pair.build, pair.shard, MeshPlan(**ONE_RANK | pair.degrees), pair.loop, folder)


def check_pair(pair: Pair) -> CheckReport:
    """Check a pair on ranks that are forked. Raises RankError."""
    with tempfile.TemporaryDirectory(prefix="meshwright-legal-") as folder:
        subject = subject_of(pair, Path(folder))
        ranks = run_forked(subject.mesh.world_size, records, subject)
        report: CheckReport = run_forked(1, judged, subject, ranks)
    return report


def try_pair(pair: Pair) -> dict[str, Any]:
    """Return the row of a pair. Raises BenchError for a library that is not installed."""
    start = time.perf_counter()
    row: dict[str, Any] = {"pair": pair.name, "fault": pair.fault, "right": False, "hints": (), "report": ""}
    try:
        report = check_pair(pair)
    except RankError as error:
        if str(error).startswith("ModuleNotFoundError"):
            raise BenchError(f"{pair.name}: {error}: pip install -e '.[zoo]'") from error
        return row | {"report": str(error), "seconds": time.perf_counter() - start}
    found = any(pair.fault in each.kind for each in report.differences)
    return row | {
        "right": found if pair.fault else report.same,
        "compared": report.compared,
        "largest": report.largest,
        "hints": report.hints,
        "report": "" if report.same else str(report),
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
    report = "" if row["right"] else f"\n{row['report']}"
    return f"{row['pair']}: {result_of(row)}, {row['seconds']:.1f} s{report}"


def result_of(row: dict[str, Any]) -> str:
    if not row["right"]:
        return "**fault not found**" if row["fault"] else "**false alarm**"
    whole = "; nothing is sharded" * any(hint.startswith("nothing is sharded") for hint in row["hints"])
    same = f"the same, {row['largest']:.1e} of {row['compared']} tensors{whole}"
    return "fault found" if row["fault"] else same


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the models and what everyone uses, one of the other pairs, and the false alarms."""
    found = {row["pair"]: row for row in rows}
    usual, head = list[str](), ("model", FULL, "DDP", f"{BY_HAND}, {FULL}", THEIRS)
    for model, pairs in itertools.groupby(pairs_of_every_model(), lambda pair: pair.model):
        of_model = {pair.sharding: found.pop(pair.name) for pair in pairs if pair.name in found}
        cells = [cell(of_model.get(sharding)) for sharding in head[1:]]
        usual += [f"| {model} | {' | '.join(cells)} |"] if of_model else []
    others = [f"| {name} | {result_of(row)} |" for name, row in found.items()]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *usual, ""] if usual else []
    lines += ["| model, sharding, mesh | check says |", "|---|---|", *others, ""] if others else []
    legal, faults = ([row for row in rows if bool(row["fault"]) == wrong] for wrong in (False, True))
    alarms, seconds = sum(not row["right"] for row in legal), sum(row["seconds"] for row in rows)
    lines.append(f"{alarms} false alarms in {len(legal)} pairs, {seconds:.0f} s")
    if faults:
        lines[-1] += f"; {sum(row['right'] for row in faults)} of {len(faults)} known faults found"
    return "\n".join(lines)


def cell(row: dict[str, Any] | None) -> str:
    """Return the largest difference of a pair; "" for one that does not exist."""
    if row is None:
        return ""
    return f"{row['largest']:.1e}" if row["right"] else "**false alarm**"


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
