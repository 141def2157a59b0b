"""A model with its optimizer and loss, put together in one place for every command that takes a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.config import Config, OptimConfig, TrainingJob
from meshwright.train.data.sequences import Batch
from meshwright.train.model.shard import shard_model
from meshwright.train.model.trained_model import LossOf, model_of
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
        """Take one optimizer step (`train_step`)."""
        parts = self.sharded, self.optimizer, micro_batches, self.grad_clip, self.loss_of
        return train_step(*parts, before_optimizer)


def build_training(
    config: Config, plan: Plan, mesh: DeviceMesh, group_timeout: timedelta | None = None
) -> Training:
    """Return the training of a config with initial weights, the same ones on every mesh.

    The model is built on the meta device and filled one parameter or module at a time, so that no rank ever
    holds the full model; with `plan.cpu_offload` parameters are in host memory. `group_timeout`: as in
    apply_fsdp. Raises ConfigError if a pattern of `train.freeze` matches no parameter, or all parameters are
    frozen.
    """
    job, seed, grad_clip = config.job, config.run.seed, config.train.grad_clip
    initialise = partial(model_of(job.model).initialise, seed=seed)
    sharded = shard_model(job, plan, mesh, group_timeout)
    return fill_training(sharded, job, config.optim, initialise, seed, grad_clip)


def fill_training(
    sharded: ShardedModel,
    job: TrainingJob,
    optim: OptimConfig,
    fill: Callable[[ShardedModel], object],
    seed: int = 0,
    grad_clip: float = 1.0,
) -> Training:
    """Second half of `build_training`, after `shard_model`: allocate the tensors with `fill`, and add
    optimizer and loss. `seed`: of the rounding of bfloat16 state."""
    fill(sharded)
    torch.cuda.empty_cache()  # the memory of the full tensors returns to the GPU; does nothing without one
    optimizer = build_optimizer(sharded.model, optim, seed)
    model, plan = model_of(job.model), sharded.plan
    loss_of = model.loss(plan, job.z_loss, job.loss)
    score_of = model.loss(plan, 0.0) if job.loss else loss_of
    return Training(sharded, optimizer, loss_of, score_of, grad_clip)
