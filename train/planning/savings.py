"""After an out-of-memory error: the single changes of a plan that free the most memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.make import LOSS_CHUNK_TOKENS, on_mesh, with_activation_checkpoint
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.selective_policy import policy_mistakes
from meshwright.parallel.plan.validate import validate
from meshwright.parallel.planner.host_memory import HostMemory, host_memory
from meshwright.parallel.planner.machines import Machines
from meshwright.train.config import TrainingJob
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.fit import as_options
from meshwright.train.planning.predict import predict, predict_memory, run_workload

SHOWN = 3  # number of savings that are suggested
WORTH = 0.01  # share of the peak: a change that frees less is not suggested


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
        of_optimizer = {"state_dtype": "bfloat16"} if changed is plan else {}
        if validate(changed, model, world_size, job.seq_len):
            continue
        try:
            needed, changed_s, host = _estimate(replace(job, **of_optimizer), changed, machines)  # type: ignore[arg-type]
        except PlanError:
            continue
        time_known = step_s and changed_s and "parallel.cpu_offload" not in keys  # whose copies are not timed
        if (freed := peak_bytes - needed) > WORTH * peak_bytes and not machines.host_problem(host):
            savings.append(Saving(keys, freed, changed_s / step_s - 1 if time_known else None))
    return sorted(savings, key=lambda saving: -saving.freed_bytes)[:SHOWN]


def _estimate(job: TrainingJob, plan: Plan, machines: Machines) -> tuple[int, float, HostMemory]:
    """Return the peak bytes of a process on its device, the seconds of a step (0 if the hardware is unknown),
    and the host memory."""
    host = host_memory(plan, run_workload(job, plan))
    if machines.hardware is None:
        memory, step_s = predict_memory(job, plan), 0.0
    else:
        predicted = predict(job, plan, machines.hardware, machines.per_node)
        memory, step_s = predicted.memory, predicted.timeline.step_s
    return memory.peak_bytes + machines.kept_bytes(host), step_s, host


def _changes(job: TrainingJob, plan: Plan, model: ModelUnits) -> Iterator[tuple[Mapping[str, object], Plan]]:
    """Yield changes that may free memory, as config keys and as a plan: the same plan for the one key that no
    plan has, optim.state_dtype. Of several values of one key only the strongest."""

    def of_units(name: str, value: Any) -> tuple[Mapping[str, object], Plan]:
        units = [replace(unit, **{name: value}) for unit in plan.units]
        return {f"parallel.{name}": value}, replace(plan, units=tuple(units))

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
    *others, last = plan.units  # which is never resharded after its forward
    if any(unit.reshard_after_forward is not True for unit in others):
        keys, changed = of_units("reshard_after_forward", True)
        yield keys, replace(changed, units=(*changed.units[:-1], last))
    if any(unit.reduce_gradients == "last_micro_batch" for unit in plan.units):
        yield of_units("reduce_gradients", "every_micro_batch")
    if not all(unit.reshard_after_backward for unit in plan.units):
        yield of_units("reshard_after_backward", True)
    if not plan.loss_chunk_tokens or plan.loss_chunk_tokens > LOSS_CHUNK_TOKENS:
        yield of_plan("loss_chunk_tokens", LOSS_CHUNK_TOKENS)
    meshes = [{"dp_replicate": 1, "dp_shard": mesh.data_parallel}] if mesh.dp_replicate > 1 else []
    if mesh.dp_shard % 2 == 0:
        meshes += [{axis: 2 * getattr(mesh, axis), "dp_shard": mesh.dp_shard // 2} for axis in ("cp", "tp")]
    for degrees in meshes:
        keys = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
        yield {**keys, **micro, **batch}, on_mesh(plan, replace(mesh, **degrees), job.parallel, model)
    if job.state_dtype == "float32":
        yield {"optim.state_dtype": "bfloat16"}, plan
    if plan.storage_dtype == "float32":
        yield of_plan("storage_dtype", "bfloat16")
    if not plan.cpu_offload:
        yield of_plan("cpu_offload", True)
