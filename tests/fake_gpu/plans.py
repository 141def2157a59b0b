"""The plans whose steps run on the fake GPU: together they use every part of the CUDA code."""

from dataclasses import dataclass

from meshwright.tools.bench.planner.dryrun import read_plans


@dataclass(frozen=True)
class Case:
    """A plan: config arguments, and the number of GPUs, in nodes of eight."""

    arguments: tuple[str, ...]
    world_size: int


CASES = {plan.name: Case(plan.arguments, plan.gpus) for plan in read_plans() if plan.tested}
