"""Resolves or chooses the plan of a run and checks it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from meshwright.models.config import LlamaConfig
from meshwright.parallel.compile.apply import check_compiler, use_cache_folder
from meshwright.parallel.machine_memory import smallest_memory
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import Config, TrainingJob
from meshwright.train.console import Console
from meshwright.train.distributed.agreement import broadcast_from_rank0, comparable_settings
from meshwright.train.distributed.process_group import choose_device, init_distributed
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import NoPredictionError
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.resolve import plan_on_device

if TYPE_CHECKING:
    from meshwright.train.planning.predict import Prediction


@dataclass(frozen=True)
class RunPlan:
    """The device and the plan of a run.

    Args:
        device, device_name: of this process
        plan: the plan of all processes
        peak_bytes: predicted peak memory of a process, or a bound of it; None before `check_memory`
        bounded: `peak_bytes` is a bound, because there is several times as much
        prediction: of the planner, if it chose the plan
        predicted: the part of it that is compared with the run, by the names in metrics.jsonl
        no_prediction: why there is no `peak_bytes` after `check_memory`
    """

    device: torch.device
    device_name: str
    plan: Plan
    peak_bytes: int | None = None
    bounded: bool = False
    prediction: "Prediction | None" = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    no_prediction: str = ""


def make_run_plan(config: Config, ranks: RankInfo, console: Console) -> RunPlan:
    """Choose the device and make the plan, checked against model, batch and machine.

    Only `parallel.plan=auto` initializes the process group. Raises PlanError, and ConfigError for a model
    that cannot be trained here.
    """
    model_of(config.model).check(config.job)
    device, device_name = choose_device(config.run, ranks)
    if config.parallel.plan == "auto":
        from meshwright.train.planning.auto import choose_for_run  # late, as the planner is a large import

        use_cache_folder(config.parallel.compile)  # the planner uses the compiler
        console.print_lines(init_distributed(config.run, comparable_settings(config), ranks, device))
        chosen, peak_bytes = choose_for_run(config.job, ranks, device, device_name, console)
        predicted = {"step_time_s": chosen.timeline.step_s, "peak_memory_gib": peak_bytes / GIB}
        needed = chosen.memory.peak_bytes
        planned = RunPlan(device, device_name, chosen.plan, needed, False, chosen, predicted)
    else:
        planned = RunPlan(device, device_name, plan_on_device(config.job, ranks, device, device_name))
        use_cache_folder(planned.plan.compile)
    check_compiler(planned.plan, device.type, ranks.local_world_size)
    return planned


def check_memory(job: TrainingJob, planned: RunPlan, ranks: RankInfo) -> RunPlan:
    """Return `planned` with `peak_bytes`: a bound, if the rank that has the least memory has ample for it;
    else a prediction, or why there is none: the run may go on without.

    Every rank calls it: rank 0 traces the model for all ranks, and compares its needs with that memory.
    Raises PlanError if it is too little.
    """
    if planned.peak_bytes is not None:  # the planner has checked it
        return planned
    smallest = smallest_memory(planned.device, ranks.local_world_size)
    bound_bytes = memory_bound(job, planned.plan)
    if bound_bytes is not None and is_ample(bound_bytes, min(smallest)):
        return replace(planned, peak_bytes=bound_bytes, bounded=True)

    def predict_peak() -> dict[str, int | str]:
        from meshwright.train.planning.fit import check_run_fits  # late: the planner, and only on rank 0

        on_device = planned.device, planned.device_name, ranks, smallest
        try:
            return {"peak_bytes": check_run_fits(job, planned.plan, *on_device)}
        except NoPredictionError as error:
            return {"no_prediction": str(error)}

    return replace(planned, **broadcast_from_rank0(ranks, predict_peak))  # type: ignore[arg-type]


OF_PROCESS_BYTES = 2 * GIB  # what a process takes beside its tensors: at most 0.6 GiB in configs/hardware
AMPLE = 2  # times the bound: room for the allocator's overhead and for copies of what the bound counts once


def memory_bound(job: TrainingJob, plan: Plan) -> int | None:
    """Return a number of bytes that the tensors of a process never exceed in a step, from sizes alone; None
    for a model of yours, of whose activations only a trace knows the sizes, and for Muon over replicas, to
    each of which an owner sends its results. It is far above what a run needs,
    but most small runs have several times as much; tests compare it with the predictions of random plans.

    As if all were float32, nothing but FSDP divided the parameters, all units were gathered and reduced at
    once, and a step kept all results of all blocks, with those of one block's backward.
    """
    model = job.model
    if not isinstance(model, LlamaConfig) or (job.optim.name == "muon" and plan.mesh.dp_replicate > 1):
        return None
    tokens, count = plan.micro_batch_size * job.seq_len, model_of(model).parameters
    rows = 5 * model.dim + model.ffn_dim + 2  # one of each weight of a block: shards are padded by less
    # weights, gradients, those of earlier micro batches, and moments; then weights and gradients of units
    values = 5 * (count // plan.mesh.shards + (model.n_layers + 1) * rows) + 5 * count
    # a tied weight has two gradients, and then their sum
    values += 2 * model.vocab_size * model.dim * model.tie_embeddings
    of_block = 16 * model.dim + 12 * model.n_kv_heads * model.head_dim + 4 * model.ffn_dim
    of_block += 4 * model.n_heads * job.seq_len * (plan.attention == "math")
    logits = min(tokens, plan.loss_chunk_tokens or tokens) * model.vocab_size
    return 4 * (values + tokens * of_block * (model.n_layers + 2) + logits)


def is_ample(bound_bytes: int, available_bytes: int) -> bool:
    """Whether a process has so much memory, on its device and its host, that it fits whatever it needs."""
    return AMPLE * bound_bytes + OF_PROCESS_BYTES <= available_bytes
