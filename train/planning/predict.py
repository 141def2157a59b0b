"""Predicts the memory and the speed of a run."""

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import cache, partial

from meshwright.models.config import LlamaConfig
from meshwright.parallel.compile.apply import cache_folder
from meshwright.parallel.errors import PlanError, one_line
from meshwright.parallel.fsdp import parameters_by_module
from meshwright.parallel.memory_breakdown import PredictedMemory
from meshwright.parallel.plan.make import RunShape, count_blocks, make_plan
from meshwright.parallel.plan.schema import Plan, innermost
from meshwright.parallel.planner.bounds import of_one_sequence
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.hardware import (
    Hardware,
    HostMemory,
    Machines,
    allocator_bytes,
    reserved_bytes,
)
from meshwright.parallel.planner.memory_model import host_memory, predict_step_memory
from meshwright.parallel.planner.progress import clock
from meshwright.parallel.planner.search import SearchResult, check_legal, search
from meshwright.parallel.planner.search_space import Choices, combinations, least_memory, with_choices
from meshwright.parallel.planner.step_time import simulate_step
from meshwright.parallel.planner.timeline import Timeline
from meshwright.parallel.planner.workload import DTYPE_BYTES, ModelWorkload, MuonWorkload
from meshwright.train.config import ModelConfig, OptimConfig, TrainingJob
from meshwright.train.errors import NoPredictionError
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.captures import TraceCase
from meshwright.train.planning.correction import Correction
from meshwright.train.planning.resolve import best_attention, best_dtype, make_shape, plan_run
from meshwright.train.planning.trace_model import cases_of, model_workload
from meshwright.train.training import frozen_parameters, groups_of, training_flops


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction for a run on one kind of machine.

    Args:
        plan: what it predicts
        memory: of one rank
        allocator_bytes: what the allocator reserves
        reserved_bytes: the same with the overhead of the process
        timeline: a step of one rank
        tokens_per_s_per_gpu: trained tokens
        mfu, mfu_causal: share of the device's peak, with FLOPs of full or causal attention; None for a CPU
            and a GPU that no file describes
        reasons: of the planner, if it chose the plan, one sentence each
        correction: of the machine's own runs, which is in the times; None for other machines
    """

    plan: Plan
    memory: PredictedMemory
    allocator_bytes: int
    reserved_bytes: int
    timeline: Timeline
    tokens_per_s_per_gpu: float
    mfu: float | None
    mfu_causal: float | None
    reasons: tuple[str, ...] = ()
    correction: Correction | None = None

    def title(self, subject: str, kind: str, measured_s: float | None = None) -> str:
        """Return the title of a picture of the step: the subject, number and kind of devices, mesh, MFU.
        `measured_s`: seconds of the measured step that the picture shows too, if any."""
        mesh, sides = self.plan.mesh, {"predicted": 1.0}
        if measured_s:
            sides["measured"] = self.timeline.step_s / measured_s
        degrees = ", ".join(f"{axis} {getattr(mesh, axis)}" for axis in mesh.axes)
        mfu = (f"{side} MFU {self.mfu * share:.1%}" if self.mfu else side for side, share in sides.items())
        return f"{subject} on {mesh.world_size} {kind}: {degrees}; {', '.join(mfu)}"


def predict(job: TrainingJob, plan: Plan, hardware: Hardware, gpus_per_node: int) -> Prediction:
    """Predict memory and time of the job under `plan` on machines of that kind. Raises PlanError for float8
    on a GPU without it."""
    if plan.float8.linears and not hardware.cores and "float8" not in hardware.matmul:
        recipe = f"parallel.float8.recipe={plan.float8.recipe}"
        raise PlanError(
            f"{recipe}: {hardware.name} does not multiply float8, which needs a GPU of compute "
            "capability 8.9 or more: use none"
        )
    work = run_workload(job, plan)
    memory = predict_step_memory(plan, work)
    timeline = simulate_step(plan, step_times(plan, work, hardware, gpus_per_node))
    rate = plan.global_batch_size * job.seq_len / timeline.step_s / plan.mesh.world_size
    peak_flops = hardware.peak_tflops[plan.units[0].param_dtype] * 1e12
    full, causal = (rate * flops / peak_flops for flops in training_flops(job))
    # without a name, peak_tflops is not a device's own: on a CPU, it is the best measured rate of one core
    mfu, mfu_causal = (full, causal) if hardware.device_names else (None, None)
    allocator, reserved = allocator_bytes(memory, hardware), reserved_bytes(memory, hardware)
    return Prediction(plan, memory, allocator, reserved, timeline, rate, mfu, mfu_causal)


def predict_memory(job: TrainingJob, plan: Plan) -> PredictedMemory:
    """Predict the memory of one rank in a step of the job under `plan`."""
    return predict_step_memory(plan, run_workload(job, plan))


def plan_for(job: TrainingJob, machines: Machines) -> Plan:
    """Make or read the plan as `plan_run` does, with the best kernel and dtype of such machines."""
    return plan_run(job, machines.processes, machines.per_node, *_best(job, machines))


def predict_needs(
    job: TrainingJob, plan: Plan, machines: Machines
) -> tuple[PredictedMemory, HostMemory, int]:
    """Return the memory of one rank, its host memory, and the device memory that its process needs."""
    work = run_workload(job, plan)
    memory, host = predict_step_memory(plan, work), host_memory(plan, work)
    return memory, host, machines.needed_bytes(memory, host)


def search_plans(job: TrainingJob, machines: Machines, leanest: bool = False) -> SearchResult:
    """Search all legal plans of the job, or with `leanest` those that need the least memory. Raises PlanError
    if there are none."""
    clock.done = f"world size {machines.processes}"
    units, parallel, shape = model_of(job.model).units, job.parallel, _shape_on(job, machines)
    if leanest:
        parallel, shape = least_memory(parallel, shape, len(units.checkpointed))
    with clock.phase("bounds"):
        return search(parallel, units, shape, machines, partial(run_workload, job))


def cases_of_search(job: TrainingJob, machines: Machines) -> Iterator[TraceCase]:
    """Yield what a search for a plan of the job can have to trace, in the order of its plans; many cases more
    than once."""
    units, shape = model_of(job.model).units, _shape_on(job, machines)
    frozen, made = _frozen_and_trained(job.model, job.freeze)[0], set[Choices]()
    every = combinations(job.parallel, shape, count_blocks(job.parallel, units))
    for choices in {choices.computed: choices for choices in every}.values():
        traced = dataclasses.replace(choices.computed, dp_replicate=None, dp_shard=None)
        if traced in made:
            continue
        with contextlib.suppress(PlanError):  # with other degrees of data parallelism it may be legal
            chosen, sizes = with_choices(job.parallel, shape, choices)
            plan = make_plan(chosen, units, sizes)
            made.add(traced)
            for each in (of_one_sequence(plan), plan):
                cases = cases_of(job.model, each, job.seq_len, frozen, job.document_mask)
                yield from (case for case, _ in cases)


def check_legal_plans(job: TrainingJob, machines: Machines) -> None:
    """Raise PlanError if the job has no legal plan. Takes no measurements: of the machines only the numbers,
    the kernels and the dtypes count."""
    check_legal(job.parallel, model_of(job.model).units, _shape_on(job, machines))


def _shape_on(job: TrainingJob, machines: Machines) -> RunShape:
    """Return the sizes that the planner makes plans for."""
    on_node = min(machines.per_node, machines.processes)
    return make_shape(job, machines.processes, on_node, *_best(job, machines))


def _best(job: TrainingJob, machines: Machines) -> tuple[str, str]:
    """Return the attention kernel and the dtype that `auto` selects there."""
    return best_attention(job, machines.hardware), best_dtype(machines.hardware)


@clock.phase("tracing")
def run_workload(job: TrainingJob, plan: Plan) -> ModelWorkload:
    """Return the model's workload under the plan, with its trained shares, what Muon updates, the size of
    moments, and whether it is saved. An optimizer of yours is taken for AdamW.

    Raises ConfigError if a pattern of `train.freeze` matches nothing, and NoPredictionError for a model of
    yours that cannot be traced.
    """
    frozen, trained = _frozen_and_trained(job.model, job.freeze)
    cache = cache_folder(job.parallel.compile)
    try:
        work = model_workload(job.model, plan, job.seq_len, frozen, job.document_mask, cache)
    except Exception as error:  # anything that its code does not do on fake tensors
        if isinstance(job.model, LlamaConfig):
            raise
        raise NoPredictionError(
            f"model.factory={job.model.factory} cannot be traced, which a prediction needs: "
            f"{one_line(f'{type(error).__name__}: {error}', 300)}: parallel.plan=manual trains it without"
        ) from error
    moment_bytes, muon = DTYPE_BYTES[job.optim.state_dtype], MuonWorkload()
    if job.optim.name == "muon":
        muon = _of_muon(job.model, with_newton_schulz_dtype(job, plan).optim, job.freeze)
    return dataclasses.replace(work, trained=trained, moment_bytes=moment_bytes, muon=muon, saves=job.saves)


def with_newton_schulz_dtype(job: TrainingJob, plan: Plan) -> TrainingJob:
    """Return the job with the dtype that optim.muon.newton_schulz_dtype=auto is on the devices of a plan: the
    kernel of attention tells which these are, and otherwise the dtype of the units."""
    muon = job.optim.muon
    if muon.newton_schulz_dtype != "auto":
        return job
    dtype = plan.units[0].param_dtype if plan.attention in ("", "cpu", "math") else "bfloat16"
    optim = dataclasses.replace(job.optim, muon=dataclasses.replace(muon, newton_schulz_dtype=dtype))
    return dataclasses.replace(job, optim=optim)


@cache
def _of_muon(model: ModelConfig, optim: OptimConfig, freeze: tuple[str, ...]) -> MuonWorkload:
    """Return what Muon updates of the trained parameters. Raises ConfigError as `make_groups`."""
    module, units = model_of(model).module, model_of(model).units
    groups, named = groups_of(model, optim, freeze), dict(module.named_parameters())
    kinds = {name: kind for group in groups if group.by == "muon" for name, kind in group.kinds.items()}
    blocks = dict[str | None, list[tuple[int, int]]]()
    for name in filter(kinds.__contains__, named):
        shapes = [(sizes[-2], sizes[-1]) for _, sizes in kinds[name].matrices]
        blocks.setdefault(innermost(name, units.blocks), []).extend(shapes)
    ours = {named[name] for name in kinds}
    trained = {named[name] for group in groups for name in group.kinds}
    shares = {
        name: sum(p.numel() for p in ours & own) / sum(p.numel() for p in trained & own)
        for name, of in parameters_by_module(module, units.modules).items()
        if ours & (own := {*of.values()})
    }
    return MuonWorkload(shares, tuple(map(tuple, blocks.values())), optim.muon.newton_schulz_dtype)


@cache
def _frozen_and_trained(
    model: ModelConfig, patterns: tuple[str, ...]
) -> tuple[frozenset[str], dict[str, float]]:
    """Return the names of the parameters that `train.freeze` matches, and each module's trained share."""
    if not patterns:
        return frozenset(), {}
    module = model_of(model).module
    trained = {p for p in module.parameters() if p.requires_grad} - frozen_parameters(module, patterns)
    shares = {
        name: sum(p.numel() for p in own.values() if p in trained) / sum(p.numel() for p in own.values())
        for name, own in parameters_by_module(module, model_of(model).units.modules).items()
    }
    return frozenset(name for name, p in module.named_parameters() if p not in trained), shares
