"""Compare the planner with the CUDA program of its plans, run on the fake H100 of `tools.dryrun`: the memory
of torch's allocator, and the kernels that inductor generates for a block and the head."""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.parallel.planner.machines import machines_of_kind
from meshwright.parallel.planner.tracing.fx_graph import FUSED
from meshwright.parallel.planner.workload import ModelWorkload
from meshwright.tools.bench.harness import BenchResult, Measurement, config_keys, read_table
from meshwright.tools.cli import format_table
from meshwright.tools.dryrun.__main__ import DEFAULT_CACHE, GPU, show
from meshwright.tools.dryrun.install import FakeGpu, install
from meshwright.tools.dryrun.launches import LaunchedGraph
from meshwright.tools.dryrun.program import run_program
from meshwright.tools.dryrun.report import predicted_reserved, read_dry_run
from meshwright.tools.plan.report import make_report
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.predict import run_workload

PLANS = Path(__file__).with_name("dryrun_plans.csv")
GPUS_PER_NODE = 8
MODULES = ("layers.0", "head")
INDUCTORS = "triton_"  # begins the names of the kernels that inductor generates


@dataclass(frozen=True)
class DryRunPlan:
    """A plan to run: the number of GPUs, arguments of train.main, and whether it is in the slow tests too."""

    name: str
    gpus: int
    arguments: tuple[str, ...]
    tested: bool


@dataclass(frozen=True)
class PhaseKernels:
    """The generated kernels of a module's forward or backward: number and bytes moved, as predicted and as
    inductor generates them."""

    module: str
    phase: str
    predicted: int
    generated: int
    predicted_bytes: float
    generated_bytes: float

    @property
    def error(self) -> float:
        """The relative error of the predicted bytes."""
        return self.predicted_bytes / self.generated_bytes - 1


@dataclass(frozen=True)
class DryRunComparison:
    """A plan's memory in bytes, allocated and reserved by the allocator, and its generated kernels."""

    plan: DryRunPlan
    predicted_peak: int
    peak: int
    predicted_reserved: int
    reserved: int
    kernels: tuple[PhaseKernels, ...]


def read_plans() -> list[DryRunPlan]:
    """Return all plans."""
    return [
        DryRunPlan(
            row["name"],
            int(row["gpus"]),
            (f"--config={row['config']}.yaml", *config_keys(row["keys"])),
            row["tested"] == "yes",
        )
        for row in read_table(PLANS)
    ]


def compare_dry_runs(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Run the plans and compare. Raises ConfigError, PlanError and BenchError."""
    plans = {plan.name: plan for plan in read_plans()}
    if unknown := set(options.only or ()) - plans.keys():
        raise ConfigError(f"--only: no plan {', '.join(sorted(unknown))}; there are {', '.join(plans)}")
    gpu = install(Path(options.cache).expanduser().absolute(), show)
    rows = []
    for plan in plans.values():
        if not options.only or plan.name in options.only:
            print(f"{plan.name} ...", file=sys.stderr, flush=True)
            rows.append(compare_dry_run(gpu, plan, overrides))
    return BenchResult(None, {"rows": [dataclasses.asdict(row) for row in rows]}, as_text(rows))


def compare_dry_run(gpu: FakeGpu, plan: DryRunPlan, overrides: Sequence[str] = ()) -> DryRunComparison:
    """Run one plan and compare."""
    arguments = [*plan.arguments, *overrides]
    machines = machines_of_kind(load_hardware()[GPU], plan.gpus, GPUS_PER_NODE)
    report = make_report(parse_config(arguments).job, machines)
    with tempfile.TemporaryDirectory(prefix="dryrun-") as name:
        run_program(gpu, Path(name), report.plan, arguments, lambda line: None)
        run = read_dry_run(Path(name))
    work = run_workload(report.job, report.plan)
    return DryRunComparison(
        plan,
        report.memory.peak_bytes,
        run.peak_bytes,
        predicted_reserved(report),
        run.reserved_bytes,
        tuple(compare_kernels(work, report.plan, run.graphs)),
    )


def compare_kernels(
    work: ModelWorkload, plan: Plan, graphs: Sequence[LaunchedGraph]
) -> Iterator[PhaseKernels]:
    """Yield a comparison for each phase of a block and of the head."""
    unit_of = {module: unit.name for unit in plan.units for module in unit.modules}
    for module in MODULES:
        for phase in ("forward", "backward"):
            predicted = [
                operation.bytes.at(plan.micro_batch_size)
                for operation in getattr(work.modules[module], phase).operations
                if operation.name.startswith(FUSED)
            ]
            generated = [
                kernel.bytes or 0
                for graph in graphs
                if unit_of[module] in graph.units and graph.phase == phase
                for kernel in graph.kernels
                if kernel.name.startswith(INDUCTORS)
            ]
            if generated:
                yield PhaseKernels(
                    module, phase, len(predicted), len(generated), sum(predicted), sum(generated)
                )


def as_text(rows: Sequence[DryRunComparison]) -> str:
    """Return both tables."""
    memory = [
        (
            row.plan.name,
            *(f"{size / GIB:.2f}" for size in (row.predicted_peak, row.peak)),
            f"{row.predicted_peak / row.peak - 1:+.1%}",
            *(f"{size / GIB:.2f}" for size in (row.predicted_reserved, row.reserved)),
            f"{row.predicted_reserved / row.reserved - 1:+.1%}",
        )
        for row in rows
    ]
    kernels = [
        (
            row.plan.name,
            each.module,
            each.phase,
            str(each.predicted),
            str(each.generated),
            f"{each.predicted_bytes / 1e9:.3f}",
            f"{each.generated_bytes / 1e9:.3f}",
            f"{each.error:+.1%}",
        )
        for row in rows
        for each in row.kernels
    ]
    of_memory = ("plan", "allocated GiB", "dry run", "error", "reserved GiB", "dry run", "error")
    of_kernels = ("plan", "module", "phase", "kernels", "dry run", "GB", "dry run", "error")
    return (
        "predicted memory, and that of the allocator in the dry run\n"
        f"{format_table(of_memory, memory)}\n\n"
        "predicted fused kernels, and those that inductor generates in the dry run\n"
        f"{format_table(of_kernels, kernels)}"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only these plans of tools/bench/planner/dryrun_plans.csv"
    )
    parser.add_argument(
        "--cache",
        default=DEFAULT_CACHE,
        metavar="FOLDER",
        help=f"where tools.dryrun has installed torch's CUDA build (default {DEFAULT_CACHE})",
    )


MEASUREMENT = Measurement(
    "dryrun",
    _add_options,
    compare_dry_runs,
    summary="the planner's kernels and memory against the CUDA program on a fake H100",
    description=(
        "Run a step of plans for 1B, 8B and 70B models on the fake H100 of tools.dryrun, and compare the "
        "memory of torch's allocator with the predicted one, and the bytes that the kernels generated by "
        "inductor for a block and the head read and write with those of the planner's list of kernels. Bytes "
        "are inductor's own estimates, which leave out results of tensor-parallel collectives. This needs no "
        "GPU, and takes some minutes."
    ),
)
