"""A model with its optimizer and loss, put together in one place for every command that takes a step, and
what its training computes."""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.apply import apply_plan
from meshwright.parallel.errors import first_of
from meshwright.parallel.model.kinds import kinds_of
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_table
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.config import Config, ModelConfig, OptimConfig, TrainingJob
from meshwright.train.data.sequences import Batch
from meshwright.train.errors import ConfigError
from meshwright.train.model.trained_model import LossOf, model_of
from meshwright.train.optim.groups import UpdateGroup, describe_groups, make_groups
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.step import StepResult, train_step


@dataclass(frozen=True)
class Training:
    """What an optimizer step consists of. Model and optimizer are updated in place. `score_of`: the loss of
    evaluations, which is our own also with a `train.loss`."""

    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    loss_of: LossOf
    score_of: LossOf
    grad_clip: float

    def step(
        self, micro_batches: Sequence[Batch], before_optimizer: Callable[[], None] = lambda: None
    ) -> StepResult:
        parts = self.sharded, self.optimizer, micro_batches, self.grad_clip, self.loss_of
        return train_step(*parts, before_optimizer)


def build_training(
    config: Config, plan: Plan, mesh: DeviceMesh, timeout: timedelta | None = None, loaded: bool = False
) -> Training:
    """Return the training of a config with initial weights, the same ones on every mesh.

    The model is built with its parameters on the meta device and filled one parameter or module at a time, so
    that no device ever holds the full model; with `plan.cpu_offload` parameters are in host memory.
    `timeout`: of groups, as in apply_fsdp. `loaded`: weights will be loaded: no initial values. Raises
    ConfigError if a pattern of `train.freeze` matches no parameter, or all parameters are frozen.
    """
    job, seed, grad_clip = config.job, config.run.seed, config.train.grad_clip
    initialise = partial(model_of(job.model).initialise, seed=seed, loaded=loaded)
    sharded = shard_model(job, plan, mesh, timeout)
    return fill_training(sharded, job, initialise, seed, grad_clip)


def fill_training(
    sharded: ShardedModel,
    job: TrainingJob,
    fill: Callable[[ShardedModel], object],
    seed: int = 0,
    grad_clip: float = 1.0,
) -> Training:
    """Second half of `build_training`, after `shard_model`: allocate the tensors with `fill`, and add
    optimizer and loss. `seed`: of the rounding of bfloat16 state."""
    fill(sharded)
    torch.cuda.empty_cache()  # the memory of the full tensors returns to the GPU; does nothing without one
    model, plan = model_of(job.model), sharded.plan
    optimizer = build_optimizer(sharded.model, job.optim, seed, model.units.blocks, sharded.mesh)
    loss_of = model.loss(plan, job.z_loss, job.loss)
    score_of = model.loss(plan, 0.0) if job.loss else loss_of
    return Training(sharded, optimizer, loss_of, score_of, grad_clip)


def shard_model(
    job: TrainingJob, plan: Plan, mesh: DeviceMesh, group_timeout: timedelta | None = None
) -> ShardedModel:
    """Return the model on the meta device with the plan applied. `group_timeout`: as in apply_fsdp. Raises
    ConfigError if a pattern of `freeze` matches no parameter, or if all parameters are frozen."""
    torch.set_float32_matmul_precision(plan.compile.float32_matmul_precision)
    model = model_of(job.model).new(job.z_loss)
    for parameter in model.parameters():  # not the buffers: position tables stay float32
        parameter.data = parameter.data.to(getattr(torch, plan.storage_dtype))
    freeze(model, job.freeze)
    return apply_plan(model, plan, mesh, gradients="sum", group_timeout=group_timeout)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training; their gradients are not computed. Raises as `frozen_parameters`."""
    for parameter in frozen_parameters(model, patterns):
        parameter.requires_grad_(False)


def frozen_parameters(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters that patterns of fqns, such as layers.0.*, match. Raises ConfigError for one
    without a match, and if nothing is left to train."""
    # remove_duplicate=False: a tied weight matches by either of its names
    named, found = dict(model.named_parameters(remove_duplicate=False)), set[nn.Parameter]()
    for pattern in patterns:
        matches = fnmatch.filter(named, pattern)
        if not matches:
            raise ConfigError(
                f"train.freeze: {pattern} matches no parameter of the model: use patterns such as "
                f"{first_of([*named])}.{nearest(pattern, named)}"
            )
        found.update(named[name] for name in matches)
    if not any(parameter.requires_grad for parameter in named.values() if parameter not in found):
        raise ConfigError(
            f"train.freeze={list(patterns)} matches all parameters and leaves nothing to train: remove one"
        )
    return found


def describe_frozen(job: TrainingJob) -> str:
    """Return how much `train.freeze` excludes, to follow the number of parameters; "" for nothing."""
    model = model_of(job.model)
    frozen = frozen_parameters(model.module, job.freeze) if job.freeze else ()
    share, count = sum(p.numel() for p in frozen) / model.parameters, len([*model.module.parameters()])
    return f", {share:.1%} of them frozen ({len(frozen)} of {count} tensors)" if frozen else ""


@cache
def groups_of(config: ModelConfig, optim: OptimConfig, freeze: tuple[str, ...] = ()) -> list[UpdateGroup]:
    """Return which parameters of a model are updated how. Raises ConfigError, as make_groups."""
    model = model_of(config)
    frozen = frozen_parameters(model.module, freeze) if freeze else ()
    kinds = kinds_of(model.module, model.units.blocks, optim.muon.per_head)
    trained = (n for n, p in model.module.named_parameters() if p.requires_grad and p not in frozen)
    return make_groups({name: kinds[name] for name in trained}, optim)


def describe_plan(job: TrainingJob, plan: Plan) -> str:
    """Return the tables of what is sharded and computed how, and of what is updated how."""
    return f"{plan_to_table(plan)}\n{describe_groups(groups_of(job.model, job.optim, job.freeze), job.optim)}"


def training_flops(job: TrainingJob) -> tuple[float, float]:
    """Return the operations of forward and backward per token, without recomputation: with all scores of
    attention, and with those below the diagonal.

    A frozen weight has no gradient, and nothing before the first trained parameter has a backward. With
    `document_mask` scores do not count, so that both are lower bounds: how many are computed depends on the
    documents.
    """
    trained_model = model_of(job.model)
    products, scores = trained_model.forward_flops(job.seq_len)
    weights = inputs = attention = 1.0  # the parts of the backward that are computed
    if job.freeze:
        model, blocks = trained_model.new(), tuple(f"{name}." for name in trained_model.units.checkpointed)
        freeze(model, job.freeze)
        sizes, reached = list[tuple[int, ...]](), False
        for name, module in model.named_modules():
            for p in module.parameters(recurse=False):
                if p.dim() > 1 and not isinstance(module, nn.Embedding):
                    n, of_block = p.numel(), p.numel() * f"{name}.".startswith(blocks)
                    sizes.append((n, n * p.requires_grad, n * reached, of_block, of_block * reached))
                reached |= p.requires_grad
        total, trained, followed, of_blocks, followed_of_blocks = map(sum, zip(*sizes, strict=True))
        weights, inputs, attention = trained / total, followed / total, followed_of_blocks / (of_blocks or 1)
    causal = 0.0 if job.document_mask else scores * (1 + 2 * attention)
    return products * (1 + weights + inputs) + 2 * causal, products * (1 + weights + inputs) + causal
