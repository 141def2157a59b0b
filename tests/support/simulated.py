"""A simulated step of one rank, and a short notation of its collectives."""

import functools
from collections.abc import Iterable

from meshwright.parallel.plan.schema import Plan, micro_batch_kinds
from meshwright.parallel.planner.cost_model import StepTimes
from meshwright.parallel.planner.fsdp_schedule import Ahead, _FsdpLaunchOrder
from meshwright.parallel.planner.stream_simulator import Task
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


def launch_tasks(plan: Plan, times: StepTimes, ahead: Ahead) -> list[Task]:
    """The tasks that the CPU launches for all micro batches of a step, which the planner simulates apart."""
    launches = _FsdpLaunchOrder(plan, times, ahead, frozenset())
    for micro_batch, count in micro_batch_kinds(plan):
        for _ in range(count):
            launches.launch_forward()
            launches.launch_backward(micro_batch)
    return launches.tasks
