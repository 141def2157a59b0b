"""Whether a run fits into memory, the nearest changes with which it fits, and, after an out-of-memory error,
the single changes of its plan that free the most memory; by the planner's memory model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.models.config import LlamaConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, PredictedMemory
from meshwright.parallel.plan.make import LOSS_CHUNK_TOKENS, on_mesh, with_activation_checkpoint
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.selective_policy import policy_mistakes
from meshwright.parallel.plan.validate import validate
from meshwright.parallel.planner.hardware import Hardware, HostMemory, Machines, find_hardware
from meshwright.parallel.planner.search_space import LEAST_MEMORY
from meshwright.parallel.planner.workload import DTYPE_BYTES
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import list_configs, load_config
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.predict import plan_for, predict, predict_needs, search_plans

MAX_PROCESSES = 65536  # limit of the search for a sufficient number of processes
MIN_SEQ_LEN = 512  # tokens: limit of the search for a shorter sequence
RECOMPUTE: Mapping[str, object] = {"parallel.activation_checkpoint": "full"}
# the values of keys with which any number of processes can run; the first is suggested
ANY_NUMBER: Mapping[str, tuple[object, ...]] = {
    "parallel.strategy": (None,),
    "parallel.dp_replicate": (1, "auto"),
    "parallel.dp_shard": (-1, "auto"),
    "train.global_batch_size": (-1,),
}
SHOWN = 3  # number of savings that are suggested
WORTH = 0.01  # share of the peak: a change that frees less is not suggested


@dataclass(frozen=True)
class Suggestion:
    """One suggested change.

    Args:
        keys: config keys to set, and their values
        needed_bytes: memory of a process with the change
        processes: number to start; None: unchanged
        config: a shipped config to train instead; "": the same model
    """

    keys: Mapping[str, object]
    needed_bytes: int
    processes: int | None = None
    config: str = ""

    def describe(self) -> str:
        """Return the change in one line, with the memory that it needs."""
        keys, needed = as_options(self.keys), f"({self.needed_bytes / GIB:.1f} GiB each)"
        if self.config:
            return " ".join(filter(None, ("here, --config", self.config, keys, needed)))
        place = f"{self.processes} processes with as much memory each" if self.processes else "here"
        return f"{place}, with {keys} {needed}" if keys else f"{place} {needed}"


def as_options(keys: Mapping[str, object]) -> str:
    """Return config keys as they are written on the command line."""
    return " ".join(f"--{key}={'null' if v is None else str(v).lower()}" for key, v in keys.items())


def check_fits(job: TrainingJob, plan: Plan, machines: Machines, device_name: str) -> PredictedMemory:
    """Return the plan's predicted memory. Raises PlanError, with the nearest changes that fit, if a process
    needs more of its device's or its host's memory than it has."""
    memory, host, needed = predict_needs(job, plan, machines)
    if machines.fits(needed, host):
        return memory
    if needed > machines.available_bytes:
        offloaded = machines.kept_bytes(host)
        parts = memory.at_peak.gib() | {
            "offloaded within it": offloaded / GIB,
            "allocator and process": (needed - memory.peak_bytes - offloaded) / GIB,
        }
        kinds = ", ".join(f"{kind} {gib:.1f}" for kind, gib in parts.items() if gib > 0.05)
        problem = (
            f"this plan needs {needed / GIB:.1f} GiB per process, but {device_name} has "
            f"{machines.available_bytes / GIB:.1f} GiB for each.\n  It needs, in GiB: {kinds}.\n"
        )
    else:
        problem = f"{machines.host_problem(host)}.\n"
    # the dtype that auto resolves to on this device
    parallel = replace(job.parallel, param_dtype=plan.units[0].param_dtype)
    fits = suggest_fits(replace(job, parallel=parallel), machines)
    raise PlanError(problem + "\n".join(f"  Fits: {suggestion.describe()}." for suggestion in fits))


def check_run_fits(
    job: TrainingJob,
    plan: Plan,
    device: torch.device,
    device_name: str,
    ranks: RankInfo,
    smallest: Sequence[int],
) -> int:
    """Return the predicted peak of a run's plan in bytes. Raises PlanError as `check_fits`. `smallest`: as in
    `this_machine`."""
    # On a CPU, host memory is the device memory: cpu_offload saves nothing.
    if device.type == "cpu":
        plan = replace(plan, cpu_offload=False)
        job = replace(job, parallel=replace(job.parallel, cpu_offload=False))
    machines = this_machine(device, ranks, find_hardware(device_name), smallest)
    in_total_gib = smallest[1] / GIB
    if (used_gib := in_total_gib - machines.available_bytes / GIB) > 0.05:
        device_name += f" ({in_total_gib:.1f} GiB, {used_gib:.1f} in use before this run allocates)"
    return check_fits(job, plan, machines, device_name).peak_bytes


def this_machine(
    device: torch.device, ranks: RankInfo, kind: Hardware | None, smallest: Sequence[int]
) -> Machines:
    """Return the machines of this run. What a process takes of a GPU before its tensors is part of its needs,
    if the kind is known, so it is not taken off what is free.

    `smallest`: a process's free and total device memory and its host memory, of the rank that has the least.
    """
    free, in_total, host = smallest
    available = min(in_total, free + (round(kind.reserved_gib * GIB) if kind else 0))
    host_bytes = None if device.type == "cpu" else host
    return Machines(ranks.world_size, ranks.local_world_size, available, kind, host_bytes)


def fewest_processes(job: TrainingJob, machines_of: Callable[[int], Machines]) -> int:
    """Return the smallest power of two of processes on which the training fits; 0 if there is none.

    With `parallel.plan=auto` the planner may choose any plan, else the config decides.
    `machines_of(processes)` returns the machines of that many processes.
    """
    counts = (2**n for n in range(MAX_PROCESSES.bit_length()))
    return next((count for count in counts if _needed_bytes(job, machines_of(count)) is not None), 0)


def suggest_fits(job: TrainingJob, machines: Machines) -> Iterator[Suggestion]:
    """Yield the nearest change of each kind with which the training fits: more processes, activation
    checkpointing, shorter sequences, a smaller shipped model."""
    opened, open_job = _on_any_number(job)
    for keys in _recomputing(job):
        count, needed = machines.processes, None
        while needed is None and count <= MAX_PROCESSES:
            needed = _needed_bytes(with_keys(open_job, keys), replace(machines, processes=count))
            if needed is not None:
                yield Suggestion({**opened, **keys}, needed, count if count != machines.processes else None)
            count *= 2
    leanest = list(_recomputing(job))[-1]
    if shorter := _longest_that_fits(with_keys(open_job, leanest), machines):
        seq_len, needed = shorter
        if seq_len < job.seq_len:
            yield Suggestion({**opened, **leanest, "train.seq_len": seq_len}, needed)
    yield from _largest_shipped(job, machines)


def _largest_shipped(job: TrainingJob, machines: Machines) -> Iterator[Suggestion]:
    """Yield the largest shipped Llama that is smaller than the job's and fits, with the longest sequence
    that fits; none in place of a model of another kind."""
    if not isinstance(job.model, LlamaConfig):
        return
    shipped = {path.name: load_config(path).job for path in list_configs()}
    sizes = {
        name: model_of(candidate.model).parameters
        for name, candidate in shipped.items()
        if isinstance(candidate.model, LlamaConfig)
    }
    smaller = [name for name, size in sizes.items() if size < model_of(job.model).parameters]
    for name in sorted(smaller, key=lambda name: sizes[name], reverse=True):
        opened, candidate = _on_any_number(shipped[name])
        for keys in _recomputing(candidate):
            if fit := _longest_that_fits(with_keys(candidate, keys), machines):
                seq_len, needed = fit
                shorter = {"train.seq_len": seq_len} if seq_len < candidate.seq_len else {}
                yield Suggestion({**opened, **keys, **shorter}, needed, config=name)
                return


def _longest_that_fits(job: TrainingJob, machines: Machines) -> tuple[int, int] | None:
    """Return the longest sequence that fits (the job's, half of it, ...) and the bytes that it needs."""
    seq_len = job.seq_len
    while seq_len >= min(job.seq_len, MIN_SEQ_LEN):
        if (needed := _needed_bytes(replace(job, seq_len=seq_len), machines)) is not None:
            return seq_len, needed
        seq_len //= 2
    return None


def _needed_bytes(job: TrainingJob, machines: Machines) -> int | None:
    """Return the bytes that a process needs; None if it does not fit or no plan is legal."""
    if not _may_fit(job, machines):
        return None
    try:
        if job.parallel.plan == "auto":
            # all open keys except tp have the values that need the least memory
            ranked = search_plans(job, machines, leanest=True).ranked
            return ranked[0].needed_bytes if ranked else None
        _, host, needed = predict_needs(job, plan_for(job, machines), machines)
    except PlanError:
        return None
    return needed if machines.fits(needed, host) else None


def _may_fit(job: TrainingJob, machines: Machines) -> bool:
    """Whether parameters and both moments (of Muon the only one, and the gradients) alone fit: a quick test,
    because each trace takes seconds."""
    bytes_each = DTYPE_BYTES[job.parallel.storage_dtype] + 2 * DTYPE_BYTES[job.optim.state_dtype]
    held = bytes_each * model_of(job.model).parameters / machines.processes
    host = HostMemory(state=int(held)) if job.parallel.cpu_offload else HostMemory()
    return bool(job.freeze) or machines.fits(0 if job.parallel.cpu_offload else int(held), host)


def _recomputing(job: TrainingJob) -> Iterator[Mapping[str, object]]:
    """Yield the keys to try: none; then full activation checkpointing, unless set or left to the planner."""
    yield {}
    if job.parallel.plan != "auto" and job.parallel.activation_checkpoint != "full":
        yield RECOMPUTE


def _on_any_number(job: TrainingJob) -> tuple[Mapping[str, object], TrainingJob]:
    """Return the job with degrees and batch left open, so that any number of processes can run it, and the
    keys that leave them open. With parallel.plan=auto both are unchanged."""
    if job.parallel.plan == "auto":
        return {}, job
    requested = {**vars(job.parallel), "global_batch_size": job.global_batch_size}
    left_open = {
        key: values[0] for key, values in ANY_NUMBER.items() if requested[key.partition(".")[2]] not in values
    }
    micro_batch_size = 1 if job.micro_batch_size == "auto" else job.micro_batch_size
    opened = {**left_open, "parallel.plan": "manual", "train.micro_batch_size": micro_batch_size}
    return left_open, with_keys(job, opened)


def with_keys(job: TrainingJob, keys: Mapping[str, Any]) -> TrainingJob:
    """Return the job with other values for some config keys, given by full name."""
    for key, value in keys.items():
        section, name = key.split(".")
        if section == "parallel":
            name, value = "parallel", replace(job.parallel, **{name: value})
        job = replace(job, **{name: value})
    return job


@dataclass(frozen=True)
class Saving:
    """A change that frees memory.

    Args:
        keys: config keys to set, and their values
        freed_bytes: reduction of the peak memory of a process
        slower: relative change of the step time (below 0: faster); None if unknown
    """

    keys: Mapping[str, object]
    freed_bytes: int
    slower: float | None

    def describe(self) -> str:
        """Return the change in one line, with the memory that it frees."""
        time = "" if self.slower is None else f", a step takes {self.slower:+.0%}"
        return f"{as_options(self.keys)}: {self.freed_bytes / GIB:.2f} GiB less{time}"


def suggest_savings(job: TrainingJob, plan: Plan, machines: Machines) -> list[Saving]:
    """Return the changes that free the most memory under `plan`, the largest first.

    Data, model and global batch stay the same.
    """
    model, world_size = model_of(job.model).units, plan.mesh.world_size
    peak_bytes, step_s, _ = _estimate(job, plan, machines)
    savings = []
    for keys, changed in _changes(job, plan, model):
        narrow = replace(job, optim=replace(job.optim, state_dtype="bfloat16"))
        if validate(changed, model, world_size, job.seq_len):
            continue
        try:
            needed, changed_s, host = _estimate(narrow if changed is plan else job, changed, machines)
        except PlanError:
            continue
        time_known = step_s and changed_s and "parallel.cpu_offload" not in keys  # whose copies are not timed
        if (freed := peak_bytes - needed) > WORTH * peak_bytes and not machines.host_problem(host):
            savings.append(Saving(keys, freed, changed_s / step_s - 1 if time_known else None))
    return sorted(savings, key=lambda saving: -saving.freed_bytes)[:SHOWN]


def _estimate(job: TrainingJob, plan: Plan, machines: Machines) -> tuple[int, float, HostMemory]:
    """Return the peak bytes of a process on its device, the seconds of a step (0 if the hardware is unknown),
    and the host memory."""
    memory, host, _ = predict_needs(job, plan, machines)
    kind = machines.hardware
    step_s = predict(job, plan, kind, machines.per_node).timeline.step_s if kind else 0.0
    return memory.peak_bytes + machines.kept_bytes(host), step_s, host


def _changes(job: TrainingJob, plan: Plan, model: ModelUnits) -> Iterator[tuple[Mapping[str, object], Plan]]:
    """Yield changes that may free memory, as config keys and as a plan: the same plan for the one key that no
    plan has, optim.state_dtype. Of several values of one key only the strongest."""

    def of_plan(name: str, value: Any) -> tuple[Mapping[str, object], Plan]:
        return {f"parallel.{name}": value}, replace(plan, **{name: value})

    # what keeps the batches, which some keys would change
    mesh, batch = plan.mesh, {"train.global_batch_size": plan.global_batch_size}
    micro = {"train.micro_batch_size": plan.micro_batch_size} if job.micro_batch_size == "auto" else {}
    modes = {u.activation_checkpoint for u in plan.units if model.checkpointed.issuperset(u.modules)}
    can_select = not any(policy_mistakes(job.parallel.selective_policy, model.attention_ops))
    for mode, helps in (("full", modes - {"full"}), ("selective", modes & {"none", "offload"})):
        if helps and (mode == "full" or can_select):
            units = with_activation_checkpoint(plan.units, mode, job.parallel, model)
            yield {"parallel.activation_checkpoint": mode}, replace(plan, units=units)
    if plan.micro_batch_size % 2 == 0:
        half = plan.micro_batch_size // 2
        halved = replace(plan, micro_batch_size=half, accumulation=2 * plan.accumulation)
        yield {"train.micro_batch_size": half, **batch}, halved
    for name in ("reshard_after_forward", "reduce_gradients", "reshard_after_backward"):
        least, last = LEAST_MEMORY[name], len(plan.units) - 1  # the last is never resharded after its forward
        changed = tuple(
            unit if (i, name) == (last, "reshard_after_forward") else replace(unit, **{name: least})
            for i, unit in enumerate(plan.units)
        )
        if changed != plan.units:
            yield {f"parallel.{name}": least}, replace(plan, units=changed)
    if not plan.loss_chunk_tokens or plan.loss_chunk_tokens > LOSS_CHUNK_TOKENS:
        yield of_plan("loss_chunk_tokens", LOSS_CHUNK_TOKENS)
    meshes = [{"dp_replicate": 1, "dp_shard": mesh.data_parallel}] if mesh.dp_replicate > 1 else []
    if mesh.dp_shard % 2 == 0:
        meshes += [{axis: 2 * getattr(mesh, axis), "dp_shard": mesh.dp_shard // 2} for axis in ("cp", "tp")]
    for degrees in meshes:
        keys = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
        yield {**keys, **micro, **batch}, on_mesh(plan, replace(mesh, **degrees), job.parallel, model)
    narrow = job.optim.name == "adamw"  # which rounds stochastically
    if narrow and job.optim.state_dtype == "float32":
        yield {"optim.state_dtype": "bfloat16"}, plan
    if narrow and plan.storage_dtype == "float32":
        yield of_plan("storage_dtype", "bfloat16")
    if not plan.cpu_offload:
        yield of_plan("cpu_offload", True)
