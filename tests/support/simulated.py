"""A simulated step of one rank, and a short notation of its collectives."""

import functools
from collections.abc import Iterable

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import StepTimes
from meshwright.parallel.planner.step_time import Task, TaskSink
from meshwright.parallel.planner.walk import StepWalk
from meshwright.parallel.simulate.collectives import Collective
from meshwright.parallel.simulate.simulator import Simulation
from meshwright.tools.simulate import simulate_run
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run

TINY = (
    "--model.dim=32",
    "--model.n_layers=3",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=64",
    "--model.vocab_size=264",
    "--train.seq_len=48",
    "--train.micro_batch_size=1",
)
SHORT = {"tok_embeddings": "tok", "tok_embeddings+head": "tok+head", "head": "head"}


@functools.cache
def simulated(world_size: int, *arguments: str, rank: int = 0) -> Simulation:
    """One simulated step of the run of these config arguments."""
    config = parse_config(arguments)
    return simulate_run(config.job, plan_run(config.job, world_size, 8), rank)


def describe_collective(
    collectives: Iterable[Collective], phases: Iterable[str] = ("forward", "backward", "recompute")
) -> str:
    """The collectives of the units in order: `2` all-gathers layers.2, `-2` reduce-scatters it, `=2`
    all-reduces it over dp_replicate, `~2` is any number of tp or cp collectives in its computation."""
    symbols: list[str] = []
    for c in collectives:
        unit = SHORT.get(c.unit, c.unit.removeprefix("layers."))
        signs = {"all_gather": "", "reduce_scatter": "-", "all_reduce": "="}
        sign = "~" if c.axis in ("tp", "cp") else signs[c.op]
        if c.unit and c.phase in phases and (sign != "~" or symbols[-1:] != [f"~{unit}"]):
            symbols.append(sign + unit)
    return " ".join(symbols)


def launch_tasks(plan: Plan, times: StepTimes) -> list[Task]:
    """The tasks that the host launches for all micro batches of a step, which the planner simulates apart."""
    sink = TaskSink(plan, times)
    StepWalk(plan, sink, times.has_backward).step()
    return sink.tasks
