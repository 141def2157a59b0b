"""Checks whether a run fits into memory, and suggests changes: the nearest ones with which it fits, or the
single keys that free the most. The planner's memory estimate is evaluated for each."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.models.llama import LlamaConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, PredictedMemory
from meshwright.parallel.plan.make import LOSS_CHUNK_TOKENS
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.devices import Devices
from meshwright.parallel.planner.host_memory import HostMemory, host_memory
from meshwright.parallel.planner.memory_model import predict_step_memory
from meshwright.parallel.planner.workload import DTYPE_BYTES
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import list_configs, load_config
from meshwright.train.model.choose import source_of
from meshwright.train.planning.device_defaults import best_attention, best_dtype
from meshwright.train.planning.predict import predict, predict_memory, run_workload, search_leanest
from meshwright.train.planning.resolve import plan_run

MAX_PROCESSES = 65536  # limit of the search for a sufficient number of processes
MIN_SEQ_LEN = 512  # tokens: limit of the search for a shorter sequence
SHOWN = 3  # number of savings that are suggested
WORTH = 0.01  # share of the peak: a change that frees less is not suggested
RECOMPUTE: Mapping[str, object] = {"parallel.activation_checkpoint": "full"}


@dataclass(frozen=True)
class Suggestion:
    """One suggested change.

    Args:
        keys: config keys to set, and their values
        needed_bytes: memory of a process with the change, at the peak or with that of the allocator
        processes: number to start; None: unchanged
        config: a shipped config to train instead; "": the same model
        freed_bytes: reduction of the peak memory of a process
        slower: relative change of the step time (below 0: faster); None if unknown
    """

    keys: Mapping[str, object]
    needed_bytes: int
    processes: int | None = None
    config: str = ""
    freed_bytes: int | None = None
    slower: float | None = None

    def describe(self) -> str:
        """Return the change in one line, with the memory that it needs or frees."""
        keys = " ".join(f"--{key}={'null' if v is None else str(v).lower()}" for key, v in self.keys.items())
        if self.freed_bytes is not None:
            time = "" if self.slower is None else f", a step takes {self.slower:+.0%}"
            return f"{keys}: {self.freed_bytes / GIB:.2f} GiB less{time}"
        needed = f"({self.needed_bytes / GIB:.1f} GiB each)"
        if self.config:
            return " ".join(filter(None, ("here, --config", self.config, keys, needed)))
        place = f"{self.processes} processes with as much memory each" if self.processes else "here"
        return f"{place}, with {keys} {needed}" if keys else f"{place} {needed}"


def check_fits(job: TrainingJob, plan: Plan, devices: Devices, device_name: str) -> PredictedMemory:
    """Return the plan's predicted memory. Raises PlanError, with the nearest changes that fit, if a process
    needs more of its device's or its host's memory than it has."""
    memory, host = predict_memory(job, plan), host_memory(plan, run_workload(job, plan))
    needed = devices.needed_bytes(memory, host)
    if devices.fits(needed, host):
        return memory
    if needed > devices.available_bytes:
        offloaded = devices.kept_bytes(host)
        parts = memory.at_peak.gib() | {
            "offloaded within it": offloaded / GIB,
            "allocator and process": (needed - memory.peak_bytes - offloaded) / GIB,
        }
        kinds = ", ".join(f"{kind} {gib:.1f}" for kind, gib in parts.items() if gib > 0.05)
        problem = (
            f"this plan needs {needed / GIB:.1f} GiB per process, but {device_name} has "
            f"{devices.available_bytes / GIB:.1f} GiB for each.\n  It needs, in GiB: {kinds}.\n"
        )
    else:
        problem = f"{devices.host_problem(host)}.\n"
    # the dtype that auto resolves to on this device
    parallel = dataclasses.replace(job.parallel, param_dtype=plan.units[0].param_dtype)
    fits = suggest_fits(dataclasses.replace(job, parallel=parallel), plan.mesh.world_size, devices)
    raise PlanError(problem + "\n".join(f"  Fits: {suggestion.describe()}." for suggestion in fits))


def fewest_processes(job: TrainingJob, devices_of: Callable[[int], Devices]) -> int:
    """Return the smallest power of two of processes on which the training fits; 0 if there is none.

    With `parallel.plan=auto` the planner may choose any plan, else the config decides.
    `devices_of(processes)` returns the devices of that many processes.
    """
    counts = (2**n for n in range(MAX_PROCESSES.bit_length()))
    return next((count for count in counts if _needed_bytes(job, count, devices_of(count)) is not None), 0)


def suggest_fits(job: TrainingJob, processes: int, devices: Devices) -> Iterator[Suggestion]:
    """Yield the nearest change of each kind with which the training fits: more processes, activation
    checkpointing, shorter sequences, a smaller shipped model."""
    opened, open_job = _on_any_number(job)
    for keys in _recomputing(job):
        count, needed = processes, None
        while needed is None and count <= MAX_PROCESSES:
            needed = _needed_bytes(with_keys(open_job, keys), count, devices)
            if needed is not None:
                yield Suggestion({**opened, **keys}, needed, count if count != processes else None)
            count *= 2
    leanest = list(_recomputing(job))[-1]
    if shorter := _longest_that_fits(with_keys(open_job, leanest), processes, devices):
        seq_len, needed = shorter
        if seq_len < job.seq_len:
            yield Suggestion({**opened, **leanest, "train.seq_len": seq_len}, needed)
    yield from _largest_shipped(job, processes, devices)


def _largest_shipped(job: TrainingJob, processes: int, devices: Devices) -> Iterator[Suggestion]:
    """Yield the largest shipped Llama that is smaller than the job's and fits, with the longest sequence
    that fits; none in place of a model of another kind."""
    if not isinstance(job.model, LlamaConfig):
        return
    shipped = {path.name: load_config(path).job for path in list_configs()}
    sizes = {
        name: source_of(candidate.model).parameters
        for name, candidate in shipped.items()
        if isinstance(candidate.model, LlamaConfig)
    }
    smaller = [name for name, size in sizes.items() if size < source_of(job.model).parameters]
    for name in sorted(smaller, key=lambda name: sizes[name], reverse=True):
        opened, candidate = _on_any_number(shipped[name])
        for keys in _recomputing(candidate):
            if fit := _longest_that_fits(with_keys(candidate, keys), processes, devices):
                seq_len, needed = fit
                shorter = {"train.seq_len": seq_len} if seq_len < candidate.seq_len else {}
                yield Suggestion({**opened, **keys, **shorter}, needed, config=name)
                return


def _longest_that_fits(job: TrainingJob, processes: int, devices: Devices) -> tuple[int, int] | None:
    """Return the longest sequence that fits (the job's, half of it, ...) and the bytes that it needs."""
    seq_len = job.seq_len
    while seq_len >= min(job.seq_len, MIN_SEQ_LEN):
        # first scaled from the job's own length, which is traced once; if that fits, traced at this length
        if _needed_bytes(job, processes, devices, seq_len) is not None:
            shorter = with_keys(job, {"train.seq_len": seq_len})
            if (needed := _needed_bytes(shorter, processes, devices)) is not None:
                return seq_len, needed
        seq_len //= 2
    return None


def _needed_bytes(
    job: TrainingJob, processes: int, devices: Devices, seq_len: int | None = None
) -> int | None:
    """Return the bytes that a process needs; None if it does not fit or no plan is legal.

    `seq_len`: scale the workload to sequences of that many tokens.
    """
    try:
        if job.parallel.plan == "auto":
            # all open keys except tp have the values that need the least memory
            ranked = search_leanest(job, processes, devices, seq_len or job.seq_len).ranked
            return ranked[0].needed_bytes if ranked else None
        if not _may_fit(job, processes, devices):
            return None
        plan = plan_run(
            job,
            processes,
            min(processes, devices.gpus_per_node),
            best_attention(job, devices.hardware),
            best_dtype(devices.hardware),
        )
        work = run_workload(job, plan).shortened(seq_len or job.seq_len)
        host = host_memory(plan, work)
        needed = devices.needed_bytes(predict_step_memory(plan, work), host)
    except PlanError:
        return None
    return needed if devices.fits(needed, host) else None


def _may_fit(job: TrainingJob, processes: int, devices: Devices) -> bool:
    """Whether parameters and both moments alone fit: a quick test without tracing the model."""
    bytes_each = DTYPE_BYTES[job.parallel.storage_dtype] + 2 * DTYPE_BYTES[job.state_dtype]
    held = bytes_each * source_of(job.model).parameters / processes
    host = HostMemory(state=int(held)) if job.parallel.cpu_offload else HostMemory()
    return bool(job.freeze) or devices.fits(0 if job.parallel.cpu_offload else int(held), host)


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
    parallel, left_open = job.parallel, dict[str, object]()
    if parallel.strategy is not None:
        left_open["parallel.strategy"] = None
    if parallel.dp_replicate not in ("auto", 1):
        left_open["parallel.dp_replicate"] = 1
    if parallel.dp_shard not in ("auto", -1):
        left_open["parallel.dp_shard"] = -1
    if job.global_batch_size != -1:
        left_open["train.global_batch_size"] = -1
    micro_batch_size = 1 if job.micro_batch_size == "auto" else job.micro_batch_size
    opened = {**left_open, "parallel.plan": "manual", "train.micro_batch_size": micro_batch_size}
    return left_open, with_keys(job, opened)


def suggest_savings(job: TrainingJob, plan: Plan, devices: Devices) -> list[Suggestion]:
    """Return the changes of single keys that free the most memory under `plan`, the largest first.

    Data, model and global batch stay the same.
    """
    current = _as_keys(job, plan)
    peak_bytes, step_s, _ = _estimate(current, plan.mesh.world_size, devices)
    suggestions = []
    for keys in _changes_of_single_keys(current, plan):
        try:
            changed = with_keys(current, keys)
            needed_bytes, changed_s, host = _estimate(changed, plan.mesh.world_size, devices)
        except (PlanError, ValueError):  # not a legal plan
            continue
        if peak_bytes - needed_bytes > WORTH * peak_bytes and not devices.host_problem(host):
            time_known = "parallel.cpu_offload" not in keys  # the predicted step time excludes its copies
            slower = changed_s / step_s - 1 if step_s and changed_s and time_known else None
            freed_bytes = peak_bytes - needed_bytes
            suggestions.append(Suggestion(keys, needed_bytes, freed_bytes=freed_bytes, slower=slower))
    return sorted(suggestions, key=lambda suggestion: -(suggestion.freed_bytes or 0))[:SHOWN]


def _estimate(job: TrainingJob, processes: int, devices: Devices) -> tuple[int, float | None, HostMemory]:
    """Return the peak bytes of a process on its device, the seconds of a step if the hardware is known, else
    None, and the host memory."""
    plan = plan_run(job, processes, devices.gpus_per_node)
    host = host_memory(plan, run_workload(job, plan))
    if devices.hardware is None:
        return predict_memory(job, plan).peak_bytes + devices.kept_bytes(host), None, host
    predicted = predict(job, plan, devices.hardware, devices.gpus_per_node)
    return predicted.memory.peak_bytes + devices.kept_bytes(host), predicted.timeline.step_s, host


def _changes_of_single_keys(job: TrainingJob, plan: Plan) -> Iterator[Mapping[str, object]]:
    """Yield candidate changes that may free memory; of several values of one key only the strongest."""
    # `batch` keeps the global batch, which some keys would change
    parallel, batch = job.parallel, {"train.global_batch_size": plan.global_batch_size}
    if parallel.activation_checkpoint != "full":
        yield RECOMPUTE
    if parallel.activation_checkpoint in ("none", "offload"):
        yield {"parallel.activation_checkpoint": "selective"}
    if plan.micro_batch_size > 1 and plan.micro_batch_size % 2 == 0:
        yield {"train.micro_batch_size": plan.micro_batch_size // 2, **batch}
    if parallel.reshard_after_forward is not True and not parallel.strategy:
        yield {"parallel.reshard_after_forward": True}
    if parallel.reduce_gradients == "last_micro_batch":
        yield {"parallel.reduce_gradients": "every_micro_batch"}
    if parallel.reshard_after_backward is False:
        yield {"parallel.reshard_after_backward": True}
    if not plan.loss_chunk_tokens or plan.loss_chunk_tokens > LOSS_CHUNK_TOKENS:
        yield {"parallel.loss_chunk_tokens": LOSS_CHUNK_TOKENS}
    if plan.mesh.dp_replicate > 1:
        yield {"parallel.dp_replicate": 1, "parallel.dp_shard": plan.mesh.data_parallel, **batch}
    if plan.mesh.dp_shard % 2 == 0:
        halved = {"parallel.dp_shard": plan.mesh.dp_shard // 2, **batch}
        yield {"parallel.cp": 2 * plan.mesh.cp, **halved}
        yield {"parallel.tp": 2 * plan.mesh.tp, **halved}
    if job.state_dtype == "float32":
        yield {"optim.state_dtype": "bfloat16"}
    if plan.storage_dtype == "float32":
        yield {"parallel.storage_dtype": "bfloat16"}
    if not plan.cpu_offload:
        yield {"parallel.cpu_offload": True}


def _as_keys(job: TrainingJob, plan: Plan) -> TrainingJob:
    """Return the job with the plan's choices in its keys, also if the planner or a plan file made them. All
    blocks get the settings of the first."""
    block = next(unit for unit in plan.units if unit.modules[0].startswith("layers."))
    parallel = dataclasses.replace(
        job.parallel,
        plan="manual",
        strategy=None,
        dp_replicate=plan.mesh.dp_replicate,
        dp_shard=plan.mesh.dp_shard,
        tp=plan.mesh.tp,
        cp=plan.mesh.cp,
        reshard_after_forward=block.reshard_after_forward,
        reshard_after_backward=block.reshard_after_backward,
        reduce_gradients=block.reduce_gradients,  # type: ignore[arg-type]
        param_dtype=block.param_dtype,
        activation_checkpoint=block.activation_checkpoint,  # type: ignore[arg-type]
        loss_chunk_tokens=plan.loss_chunk_tokens,
        storage_dtype=plan.storage_dtype,
        cpu_offload=plan.cpu_offload,
        attention=plan.attention,
    )
    return dataclasses.replace(
        job,
        parallel=parallel,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.global_batch_size,
    )


def with_keys(job: TrainingJob, keys: Mapping[str, Any]) -> TrainingJob:
    """Return the job with other values for some config keys, given by full name."""
    for key, value in keys.items():
        section, name = key.split(".")
        if section == "parallel":
            name, value = "parallel", dataclasses.replace(job.parallel, **{name: value})
        job = dataclasses.replace(job, **{name: value})
    return job
