"""What of a step's communication computing waits for, and what each way to hide more of it would bring, in
the simulated step."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan, UnitPlan
from meshwright.parallel.planner.cost_model import StepTimes, step_times
from meshwright.parallel.planner.fsdp_schedule import launch_tasks, start_ahead
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.memory_model import predict_step_memory, reserved_bytes
from meshwright.parallel.planner.stream_simulator import Task, find_waits, run_tasks
from meshwright.tools.bench.harness import BenchResult, check_page, fill_page, markdown_table
from meshwright.tools.bench.train_run import config_to_record
from meshwright.tools.cli import format_table, positive
from meshwright.tools.plan.report import Target, find_gpu
from meshwright.train.config import Config, TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import run_workload, search_plans

SUMMARY = "what of communication is exposed in the simulated step, and what would hide it"
DESCRIPTION = (
    "Plan a run as `scale` does and play its step; then again with one thing changed at a time: what the "
    "plan can change (reduce_dtype, prefetching, resharding, joined units, async tensor parallelism, FSDP in "
    "place of HSDP), and what FSDP2 could do otherwise (a communicator of its own for reduce-scatters, two "
    "buffers for them, no gather of the embedding in the backward, the all-reduce of HSDP in line with the "
    "reduce-scatters). Without --config the cases of docs/scaling.md. Nothing runs; all of it is prediction."
)
EPILOG = "Config keys of train.main are accepted too, as --section.key=value: what they give is not chosen."
CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (  # config, GPUs, keys that are given
    ("llama_8b", 1024, ()),
    ("llama_70b", 1024, ()),
    ("llama_405b", 1024, ()),
    (
        "llama_8b",
        4096,
        ("--parallel.tp=1", "--parallel.dp_replicate=1", "--parallel.reshard_after_forward=true"),
    ),
    (
        "llama_70b",
        1024,
        (
            "--parallel.tp=8",
            "--parallel.dp_replicate=1",
            "--parallel.activation_checkpoint=full",
            "--parallel.reshard_after_forward=true",
            "--train.micro_batch_size=2",
            "--train.global_batch_size=256",
        ),
    ),
)
LANES = ("all_gather", "reduce_scatter", "all_reduce", "tp", "offload")
Tasks = list[Task]


@dataclass(frozen=True)
class Variation:
    """One thing done otherwise.

    Args:
        plan: the plan with it, None where it makes no difference to such a plan
        tasks: the step's tasks with it
        one_link: whether collectives in flight together share the link
    """

    plan: Callable[[Plan], Plan | None] = lambda plan: plan
    tasks: Callable[[Tasks], Tasks] = lambda tasks: tasks
    one_link: bool = True


def _every_unit(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, units=tuple(replace(unit, **changes) for unit in plan.units))


def _reduced_in_bfloat16(plan: Plan) -> Plan | None:
    return None if plan.units[0].reduce_dtype == "bfloat16" else _every_unit(reduce_dtype="bfloat16")(plan)


def _joined(plan: Plan) -> Plan:
    """Every two neighbouring blocks in one unit, as a large enough parallel.unit_min_params makes it."""
    first, *blocks, last = plan.units
    pairs = (blocks[i : i + 2] for i in range(0, len(blocks), 2))
    units = (
        replace(pair[0], modules=tuple(name for unit in pair for name in unit.modules)) for pair in pairs
    )
    return replace(plan, units=(first, *units, last))


def _kept_gathered(plan: Plan) -> Plan | None:
    return _every_unit(reshard_after_forward=False)(plan) if _regathering(plan) else None


def _async_tp(plan: Plan) -> Plan | None:
    return replace(plan, async_tp=True) if plan.mesh.tp > 1 and not plan.async_tp else None


def _all_sharded(plan: Plan) -> Plan | None:
    mesh = plan.mesh
    whole = replace(mesh, dp_replicate=1, dp_shard=mesh.dp_shard * mesh.dp_replicate)
    return replace(plan, mesh=whole) if mesh.dp_replicate > 1 else None


def _sharded(plan: Plan) -> Plan | None:
    return plan if plan.mesh.dp_shard > 1 else None


def _regathering(plan: Plan) -> Plan | None:
    """Only where the embedding is a unit of its own that is gathered again."""
    unit: UnitPlan = plan.forward_order[0]
    return (
        plan
        if len(unit.modules) == 1 and unit.reshard_after_forward is not False and plan.mesh.dp_shard > 1
        else None
    )


def _replicated(plan: Plan) -> Plan | None:
    return plan if plan.mesh.dp_replicate > 1 else None


def own_communicator(tasks: Tasks) -> Tasks:
    """All-gathers and reduce-scatters do not wait for one another:
    FSDPModule.set_separate_reduce_scatter_group of torch 2.13."""
    apart = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
    return [
        replace(task, after=tuple(i for i in task.after if tasks[i].lane != apart.get(task.lane)))
        for task in tasks
    ]


def two_buffers(tasks: Tasks) -> Tasks:
    """A gradient is copied in while the reduction before it goes on, and waits for the one before that:
    FSDPModule.set_reduce_scatter_max_input_buffers(2) of torch 2.13."""
    before, last = dict[int, tuple[int, ...]](), tuple[int, ...]()
    for index, task in enumerate(tasks):
        if task.lane == "reduce_scatter":
            before[index], last = last, (index,)
    later = [tuple(dict.fromkeys(j for i in task.after for j in before.get(i, (i,)))) for task in tasks]
    return [
        replace(task, after=after) if task.work == "copy_in" else task
        for task, after in zip(tasks, later, strict=True)
    ]


def no_last_gather(tasks: Tasks) -> Tasks:
    """The embedding's backward needs no weights: FSDPModule.set_unshard_in_backward(False)."""
    unit = tasks[0].unit
    gone = [
        task.unit == unit and task.phase == "backward" and task.work in ("all_gather", "copy_out")
        for task in tasks
    ]
    return [replace(task, alone_s=0.0) if skip else task for task, skip in zip(tasks, gone, strict=True)]


def in_line(tasks: Tasks) -> Tasks:
    """A reduce-scatter waits for the all-reduce of the unit before: without FSDP2's stream for
    all-reduces."""
    changed, last = list[Task](), tuple[int, ...]()
    for index, task in enumerate(tasks):
        changed.append(replace(task, after=(*task.after, *last)) if task.lane == "reduce_scatter" else task)
        last = (index,) if task.lane == "all_reduce" else last
    return changed


VARIATIONS = {
    "as planned": Variation(),
    "reduce_dtype bfloat16": Variation(_reduced_in_bfloat16),
    "prefetch 2 units": Variation(_every_unit(forward_prefetch=2, backward_prefetch=2)),
    "kept gathered until the backward": Variation(_kept_gathered),
    "units of two blocks": Variation(_joined),
    "async_tp": Variation(_async_tp),
    "FSDP in place of HSDP": Variation(_all_sharded),
    "all-reduce in line": Variation(_replicated, in_line),
    "embedding gathered once": Variation(_regathering, no_last_gather),
    "two reduce buffers": Variation(_sharded, two_buffers),
    "own communicator, one link": Variation(_sharded, own_communicator),
    "own communicator, at best": Variation(_sharded, own_communicator, one_link=False),
}


def play(plan: Plan, times: StepTimes, lever: Variation) -> tuple[float, dict[str, float]]:
    """The whole step, optimizer included, with one thing done otherwise: its seconds, and the exposed ones by
    lane."""
    all_reduces = [*[False] * (plan.accumulation - 1), True]
    tasks = lever.tasks(launch_tasks(plan, times, start_ahead(plan), all_reduces))
    spans = run_tasks(tasks, times.slowdown, lever.one_link)
    exposed_s = dict.fromkeys(LANES, 0.0)
    for wait in find_waits(tasks, spans):
        exposed_s[tasks[wait.task].lane] += wait.end_s - wait.start_s
    exposed_s["tp"] += sum(task.alone_s for task in tasks if task.lane == "tp")
    return max(span.end_s for span in spans) + times.optimizer_s, exposed_s


def judge(
    job: TrainingJob, plan: Plan, lever: Variation, hardware: Hardware, gpus_per_node: int
) -> dict[str, Any]:
    """The step with one thing done otherwise, and the memory of the lever's plan, without what FSDP2 would
    add."""
    work = run_workload(job, plan)
    step_s, exposed_s = play(plan, step_times(plan, work, hardware, gpus_per_node), lever)
    reserved_gib = reserved_bytes(predict_step_memory(plan, work), hardware) / GIB
    return {
        "step_s": step_s,
        "exposed_by_lane_s": exposed_s,
        "reserved_gib": reserved_gib,
        "fits": reserved_gib <= hardware.memory_gib,
    }


def add_overlap_options(parser: argparse.ArgumentParser) -> None:
    """Options of `overlap`."""
    parser.add_argument("--config", metavar="NAME_OR_PATH", help="one run instead of the cases")
    parser.add_argument("--gpus", type=positive, default=1024, metavar="N", help="of that run (default 1024)")
    parser.add_argument(
        "--gpu", default="h100-sxm", metavar="KIND", help="a file of configs/hardware (default h100-sxm)"
    )
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="default 8")
    parser.add_argument(
        "--page", type=Path, metavar="FILE.md", help="write a table of all into this page, between its marks"
    )


def measure_overlap(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """All levers on all cases. Raises ConfigError, and PlanError where no plan fits."""
    hardware = find_gpu(options.gpu)
    if options.page:
        check_page(options.page, "overlap")
    cases = ((options.config, options.gpus, ()),) if options.config else CASES
    runs, configs = list[dict[str, Any]](), dict[str, Any]()
    for (name, gpus, keys), number in zip(cases, count(1)):
        config = make_config(name, gpus, (*keys, *overrides))
        place = Target(gpus, min(gpus, options.gpus_per_node), hardware)
        plan = best_plan(config.job, place)
        configs[f"{number} {Path(name).stem}"] = config_to_record(config)
        runs.append(
            {
                "config": Path(name).stem,
                "gpus": gpus,
                "keys": [*keys, *overrides],
                "mesh": dataclasses.asdict(plan.mesh),
                "micro_batch_size": plan.micro_batch_size,
                "activation_checkpoint": plan.units[len(plan.units) // 2].activation_checkpoint,
                "levers": dict(pull_all(config.job, plan, hardware, place.gpus_per_node)),
            }
        )
    figures = {
        "predicted": True,
        "hardware_file": hardware.name,
        "gpus_per_node": options.gpus_per_node,
        "runs": runs,
    }
    if options.page:
        fill_page(options.page, "overlap", page_part(figures))
    return BenchResult(configs, figures, overlap_text(figures))


def make_config(name: str, gpus: int, keys: Sequence[str]) -> Config:
    """Two sequences for each GPU, as `scale` has them, and what is not given left to the planner."""
    batch = f"--train.global_batch_size={2 * gpus}"
    return parse_config([f"--config={name}", "--parallel.plan=auto", batch, *keys], "tools.bench")


def best_plan(job: TrainingJob, place: Target) -> Plan:
    """The planner's choice. Raises PlanError where none fits."""
    machines = place.machines()
    choice = search_plans(job, place.gpus, machines)
    if not choice.ranked:
        raise PlanError(
            f"overlap: no plan fits on {place.gpus} {machines.hardware.name}. Take more GPUs, with --gpus"
        )
    return choice.best.plan


def pull_all(
    job: TrainingJob, plan: Plan, hardware: Hardware, gpus_per_node: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and figures of every lever that makes a difference to such a plan."""
    for name, lever in VARIATIONS.items():
        if changed := lever.plan(plan):
            yield name, judge(job, changed, lever, hardware, gpus_per_node)


def overlap_text(figures: dict[str, Any]) -> str:
    """A table for each case."""
    parts = []
    for run in figures["runs"]:
        base = run["levers"]["as planned"]["step_s"]
        mesh = " x ".join(f"{axis} {degree}" for axis, degree in run["mesh"].items())
        title = (
            f"{run['config']} on {run['gpus']:,} {figures['hardware_file']}: {mesh}, "
            f"{run['activation_checkpoint']}, micro batch {run['micro_batch_size']}"
        )
        parts.append(
            f"{title}\n"
            + format_table(
                ("", "step ms", "change", "exposed", *(f"{lane} ms" for lane in LANES), "GiB"),
                [_row(name, one, base) for name, one in run["levers"].items()],
            )
        )
    return "\n\n".join(
        [
            *parts,
            f"predicted with configs/hardware/{figures['hardware_file']}.yaml; nothing of it is measured",
        ]
    )


def page_part(figures: dict[str, Any]) -> str:
    """One table of all cases as Markdown: what is exposed, and by how much each lever changes the step."""
    runs = figures["runs"]
    head = ["", *(f"{run['config']}, {run['gpus']:,} GPUs" for run in runs)]
    planned = [run["levers"]["as planned"] for run in runs]
    rows = [
        [
            "tp x replicate x shard",
            *(
                " x ".join(str(run["mesh"][axis]) for axis in ("tp", "dp_replicate", "dp_shard"))
                for run in runs
            ),
        ],
        ["step, ms", *(f"{one['step_s'] * 1e3:,.0f}" for one in planned)],
    ]
    for lane in LANES:
        if any(one["exposed_by_lane_s"][lane] for one in planned):
            rows.append(
                [f"exposed: {lane}, ms", *(f"{one['exposed_by_lane_s'][lane] * 1e3:,.1f}" for one in planned)]
            )
    for name in list(VARIATIONS)[1:]:
        pulled = [(run["levers"].get(name), one["step_s"]) for run, one in zip(runs, planned, strict=True)]
        rows.append([name, *(_change(lever, base_s) if lever else "" for lever, base_s in pulled)])
    return markdown_table(head, rows)


def _change(played: dict[str, Any], base_s: float) -> str:
    return f"{played['step_s'] / base_s - 1:+.2%}" + ("" if played["fits"] else ", does not fit")


def _row(name: str, played: dict[str, Any], base_s: float) -> list[str]:
    exposed, step_s = played["exposed_by_lane_s"], played["step_s"]
    lanes = [f"{exposed[lane] * 1e3:,.1f}" for lane in LANES]
    return [
        name,
        f"{step_s * 1e3:,.1f}",
        _change(played, base_s),
        f"{sum(exposed.values()) / step_s:.2%}",
        *lanes,
        f"{played['reserved_gib']:.1f}",
    ]
