"""`parallel.plan: auto`: the plan that the planner chooses for a run, and what is said when none will do."""

import dataclasses
from collections.abc import Iterator, Mapping

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.make import Job
from meshwright.parallel.planner.search import Choice, Machines, frugal, search
from meshwright.train.attention_kernel import best_attention
from meshwright.train.best_dtype import best_dtype
from meshwright.train.config import Config
from meshwright.train.fits import MAX_PROCESSES, halvings
from meshwright.train.planning import make_job, model_units
from meshwright.train.predict import trace_run


def choose_plan(config: Config, world_size: int, machines: Machines) -> Choice:
    """The best plan for the run that `config` describes, and the others. Raises PlanError if none is legal or
    none fits, with what would."""
    job = _make_job(config, world_size, machines)
    choice = search(
        config.parallel, model_units(config.model), job, machines, lambda plan: trace_run(config, plan)
    )
    if choice.fitting:
        return choice
    nearest = choice.too_large[0]
    raise PlanError(
        f"parallel.plan=auto: none of {len(choice.too_large)} plans fits. A process has "
        f"{machines.available_bytes / GIB:.1f} GiB, and the plan that needs least needs at least "
        f"{nearest.needed_bytes / GIB:.1f} ({describe_choices(nearest.choices)}).\n"
        + "\n".join(f"  Fits: {way}." for way in _ways_out(config, world_size, machines))
    )


def fewest_gpus(config: Config, machines: Machines, at_least: int = 1) -> int:
    """The smallest number of GPUs, `at_least` or twice as many and so on, that some plan fits on; 0 if none
    does."""
    counts = [at_least * 2**n for n in range(MAX_PROCESSES.bit_length()) if at_least * 2**n <= MAX_PROCESSES]
    return next((gpus for gpus in counts if _fits_somehow(config, gpus, machines, config.train.seq_len)), 0)


def describe_choices(choices: Mapping[str, object]) -> str:
    """As they are written on the command line, without sections."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in choices.items())


def _make_job(config: Config, world_size: int, machines: Machines) -> Job:
    kind, per_node = machines.hardware, min(machines.gpus_per_node, world_size)
    return make_job(config, world_size, per_node, best_attention(config, kind), best_dtype(kind))


def _fits_somehow(config: Config, gpus: int, machines: Machines, seq_len: int) -> bool:
    """Whether a plan that spends as little memory as it can fits on so many GPUs, with sequences of `seq_len`
    tokens."""
    model = model_units(config.model)
    parallel, job = frugal(config.parallel, _make_job(config, gpus, machines), len(model.checkpointed))
    try:
        choice = search(
            parallel,
            model,
            dataclasses.replace(job, seq_len=seq_len),
            machines,
            lambda plan: trace_run(config, plan).shortened(seq_len),
        )
    except PlanError:
        return False
    return bool(choice.fitting)


def _ways_out(config: Config, world_size: int, machines: Machines) -> Iterator[str]:
    """The nearest asks that are possible."""
    if gpus := fewest_gpus(config, machines, world_size):
        yield f"{gpus} processes with as much memory each"
    for shorter in halvings(config.train.seq_len):
        if shorter < config.train.seq_len and _fits_somehow(config, world_size, machines, shorter):
            yield f"here, with --train.seq_len={shorter}"
            break
