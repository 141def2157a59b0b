"""Builds the sharded model, and counts what its training computes."""

import fnmatch
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.apply import apply_plan
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.config import TrainingJob
from meshwright.train.errors import ConfigError
from meshwright.train.model.trained_model import model_of


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
    """Exclude parameters from training by fqn pattern, such as layers.0.*; their gradients are not computed.

    Raises ConfigError for a pattern without a match, and if nothing is left to train.
    """
    for pattern in patterns:
        # remove_duplicate=False: a tied weight matches by either of its names
        matches = [
            p
            for name, p in model.named_parameters(remove_duplicate=False)
            if fnmatch.fnmatchcase(name, pattern)
        ]
        if not matches:
            raise ConfigError(
                f"train.freeze: {pattern} matches no parameter: use a name such as tok_embeddings.weight or "
                "layers.0.*"
            )
        for parameter in matches:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"train.freeze={list(patterns)} matches all parameters and leaves nothing to train: remove one"
        )


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
