"""Whether a plan fits into memory; if not the nearest things that would, and the single changes that would
free most, by the planner's estimate."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.models.size import count_parameters
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.memory_model import predict_step_memory
from meshwright.parallel.planner.workload import DTYPE_BYTES
from meshwright.train.config import Config
from meshwright.train.config_parser import list_configs, load_config
from meshwright.train.planning.predict import predict, predict_memory, run_workload
from meshwright.train.planning.resolve import plan_run

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
            work = run_workload(candidate, plan)
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


SHOWN = 3
LOSS_CHUNK_TOKENS = 2048  # what parallel.loss_chunk_tokens=auto means for long micro batches
WORTH = 0.01  # of the peak: what frees less is no way out


@dataclass(frozen=True)
class Saving:
    """Keys to give, by name; the bytes per process that this frees at the peak; and how much longer a step
    takes, as a share of it (below 0: shorter), None where that cannot be said."""

    keys: Mapping[str, object]
    freed_bytes: int
    slower: float | None

    def describe(self) -> str:
        """In one line."""
        keys = " ".join(f"--{key}={str(value).lower()}" for key, value in self.keys.items())
        time = "" if self.slower is None else f", a step takes {self.slower:+.0%}"
        return f"{keys}: {self.freed_bytes / 2**30:.2f} GiB less{time}"


def largest_savings(
    config: Config, plan: Plan, hardware: Hardware | None, gpus_per_node: int
) -> list[Saving]:
    """At most SHOWN, the largest first, of those that leave data, model and global batch as they are."""
    now = _as_keys(config, plan)
    peak_bytes, step_s = _estimate(now, plan, hardware, gpus_per_node)
    savings = []
    for keys in _changes(now, plan):
        try:
            needed_bytes, changed_s = _estimate(_with_keys(now, keys), plan, hardware, gpus_per_node)
        except (PlanError, ValueError):  # not a legal plan here
            continue
        if peak_bytes - needed_bytes > WORTH * peak_bytes:
            in_time = "parallel.cpu_offload" not in keys  # its copies are not in the step's time
            slower = changed_s / step_s - 1 if step_s and changed_s and in_time else None
            savings.append(Saving(keys, peak_bytes - needed_bytes, slower))
    return sorted(savings, key=lambda saving: -saving.freed_bytes)[:SHOWN]


def _estimate(
    config: Config, plan: Plan, hardware: Hardware | None, gpus_per_node: int
) -> tuple[int, float | None]:
    """Bytes of a process at its peak, and the seconds of a step."""
    changed = plan_run(config, plan.mesh.world_size, gpus_per_node, plan.attention)
    if hardware is None:
        return predict_memory(config, changed).peak_bytes, None
    predicted = predict(config, changed, hardware, gpus_per_node)
    return predicted.memory.peak_bytes, predicted.timeline.step_s


def _changes(config: Config, plan: Plan) -> Iterator[Mapping[str, object]]:
    """Whatever may free something. Changes of one thing that free more than another of the same come
    alone."""
    # which some keys would change
    parallel, batch = config.parallel, {"train.global_batch_size": plan.global_batch_size}
    if parallel.activation_checkpoint != "full":
        yield {"parallel.activation_checkpoint": "full"}
    if parallel.activation_checkpoint in ("none", "offload"):
        yield {"parallel.activation_checkpoint": "selective"}
    if plan.micro_batch_size > 1 and plan.micro_batch_size % 2 == 0:
        yield {"train.micro_batch_size": plan.micro_batch_size // 2, **batch}
    if parallel.reshard_after_forward is not True and not parallel.strategy:
        yield {"parallel.reshard_after_forward": True}
    if not plan.loss_chunk_tokens or plan.loss_chunk_tokens > LOSS_CHUNK_TOKENS:
        yield {"parallel.loss_chunk_tokens": LOSS_CHUNK_TOKENS}
    if plan.mesh.dp_replicate > 1:
        yield {"parallel.dp_replicate": 1, "parallel.dp_shard": plan.mesh.data_parallel, **batch}
    if plan.mesh.dp_shard % 2 == 0:
        yield {"parallel.tp": 2 * plan.mesh.tp, "parallel.dp_shard": plan.mesh.dp_shard // 2, **batch}
    if config.optim.state_dtype == "float32":
        yield {"optim.state_dtype": "bfloat16"}
    if plan.storage_dtype == "float32":
        yield {"parallel.storage_dtype": "bfloat16"}
    if not plan.cpu_offload:
        yield {"parallel.cpu_offload": True}


def _as_keys(config: Config, plan: Plan) -> Config:
    """The same run by keys of its own, also where the planner or a plan file has decided: of the blocks as of
    the first."""
    block = next(unit for unit in plan.units if unit.modules[0].startswith("layers."))
    decided: dict[str, Any] = {
        "plan": "manual",
        "strategy": None,
        "dp_replicate": plan.mesh.dp_replicate,
        "dp_shard": plan.mesh.dp_shard,
        "tp": plan.mesh.tp,
        "reshard_after_forward": block.reshard_after_forward,
        "param_dtype": block.param_dtype,
        "activation_checkpoint": block.activation_checkpoint,
        "loss_chunk_tokens": plan.loss_chunk_tokens,
        "storage_dtype": plan.storage_dtype,
        "cpu_offload": plan.cpu_offload,
    }
    train = dataclasses.replace(
        config.train, micro_batch_size=plan.micro_batch_size, global_batch_size=plan.global_batch_size
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **decided), train=train)


def _with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    for key, value in keys.items():
        section, name = key.split(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
