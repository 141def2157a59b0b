"""Whether a plan fits into memory, and the nearest things that would."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from meshwright.models.size import count_parameters
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.memory_model import predict_step_memory
from meshwright.parallel.planner.workload import DTYPE_BYTES
from meshwright.train.config import Config, list_configs, load_config
from meshwright.train.planning import plan_run
from meshwright.train.predict import predict_memory, trace_run

MAX_PROCESSES = 65536  # where the search for how many processes would do ends
MIN_SEQ_LEN = 512  # tokens: where the search for a shorter sequence ends


def check_fits(config: Config, plan: Plan, available_bytes: int, device_name: str) -> StepMemory:
    """Raise PlanError if the plan needs more than a process has, saying the nearest things that would fit."""
    needed = predict_memory(config, plan)
    if needed.peak_bytes <= available_bytes:
        return needed
    kinds = ", ".join(f"{kind} {gib:.1f}" for kind, gib in needed.at_peak.gib().items() if gib > 0.05)
    # what auto is here
    parallel = dataclasses.replace(config.parallel, param_dtype=plan.units[0].param_dtype)
    fits = _nearest_that_fit(
        dataclasses.replace(config, parallel=parallel), plan.mesh.world_size, available_bytes
    )
    raise PlanError(
        f"this plan needs {needed.peak_bytes / GIB:.1f} GiB per process, and {device_name} has "
        f"{available_bytes / GIB:.1f} GiB for each.\n  It needs, in GiB: {kinds}.\n"
        + "\n".join(f"  Fits: {way}." for way in fits)
    )


def _nearest_that_fit(config: Config, world_size: int, available_bytes: int) -> list[str]:
    """Ways out, each tried against the same estimate: recomputing here, more processes, a smaller model
    here."""
    ways, opened = [], _opened_keys(config)
    for recomputing, candidate in _with_and_without_recomputing(_on_any_number(config)):
        keys = " ".join(filter(None, (opened, recomputing)))
        for processes in _doublings(world_size, MAX_PROCESSES):
            needed = _need(candidate, processes, available_bytes)
            if needed is not None and needed <= available_bytes:
                place = (
                    "here" if processes == world_size else f"{processes} processes with as much memory each"
                )
                ways.append(f"{place}{keys and f', with {keys}'} ({needed / GIB:.1f} GiB each)")
                break
    smaller = _largest_shipped(world_size, available_bytes)
    return [*ways, smaller] if smaller else ways


def _largest_shipped(world_size: int, available_bytes: int) -> str:
    """The largest shipped model that fits, at the longest sequence it fits with."""
    models = sorted(
        map(load_config, list_configs()), key=lambda c: count_parameters(c.model).total, reverse=True
    )
    for config in models:
        name = Path(str(config.run.dir)).name
        for keys, candidate in _with_and_without_recomputing(_on_any_number(config)):
            if not _may_fit(candidate, world_size, available_bytes):
                continue
            plan = plan_run(candidate, world_size)
            work = trace_run(candidate, plan)
            for seq_len in halvings(config.train.seq_len):
                needed = predict_step_memory(plan, work.shortened(seq_len)).peak_bytes
                if needed <= available_bytes:
                    keys += f" --train.seq_len={seq_len}" if seq_len < config.train.seq_len else ""
                    return " ".join(
                        ["here, --config", f"{name}.yaml", *keys.split(), f"({needed / GIB:.1f} GiB each)"]
                    )
    return ""


def _on_any_number(config: Config) -> Config:
    """The same training with degrees and batch left open, so that any number of processes can run it."""
    parallel = dataclasses.replace(
        config.parallel, plan="manual", strategy=None, dp_replicate="auto", dp_shard="auto"
    )
    micro_batch_size = 1 if config.train.micro_batch_size == "auto" else config.train.micro_batch_size
    train = dataclasses.replace(config.train, micro_batch_size=micro_batch_size, global_batch_size=-1)
    return dataclasses.replace(config, parallel=parallel, train=train)


def _opened_keys(config: Config) -> str:
    """The keys that say what `_on_any_number` changes, as overrides."""
    keys = {
        "parallel.strategy": (config.parallel.strategy, (None,), "null"),
        "parallel.dp_replicate": (config.parallel.dp_replicate, ("auto", 1), "1"),
        "parallel.dp_shard": (config.parallel.dp_shard, ("auto", -1), "-1"),
        "train.global_batch_size": (config.train.global_batch_size, (-1,), "-1"),
    }
    return " ".join(f"--{key}={value}" for key, (asked, same, value) in keys.items() if asked not in same)


def _with_and_without_recomputing(config: Config) -> list[tuple[str, Config]]:
    parallel = dataclasses.replace(config.parallel, activation_checkpoint="full")
    full = dataclasses.replace(config, parallel=parallel)
    return [("", config), ("--parallel.activation_checkpoint=full", full)]


def _need(config: Config, processes: int, available_bytes: int) -> int | None:
    """Bytes of each of so many processes; None if no plan is possible, or clearly too large."""
    if not _may_fit(config, processes, available_bytes):
        return None
    try:
        return predict_memory(config, plan_run(config, processes)).peak_bytes
    except PlanError:
        return None


def _may_fit(config: Config, processes: int, available_bytes: int) -> bool:
    """Whether parameters and both moments alone leave room: what a look tells without tracing the model."""
    frozen = config.train.freeze or config.parallel.cpu_offload
    each = DTYPE_BYTES[config.parallel.storage_dtype] + 2 * DTYPE_BYTES[config.optim.state_dtype]
    return bool(frozen) or each * count_parameters(config.model).total / processes < available_bytes


def halvings(seq_len: int) -> Iterator[int]:
    """Lengths to try, the longest first."""
    yield seq_len
    while seq_len >= 2 * MIN_SEQ_LEN:
        seq_len //= 2
        yield seq_len


def _doublings(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
