"""The sharded model with its initial weights."""

import fnmatch
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.models.llama import Llama, LlamaConfig, init_weights
from meshwright.parallel.apply import apply_plan
from meshwright.parallel.fsdp import copy_shard
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import TrainConfig
from meshwright.train.errors import ConfigError


def build_model(
    config: LlamaConfig, train: TrainConfig, plan: Plan, mesh: DeviceMesh, device: torch.device, seed: int
) -> Llama:
    """Built on the meta device and filled one parameter at a time, so no rank ever holds the whole.

    With `plan.cpu_offload` parameters stay in host memory. Raises ConfigError for a `train.freeze` that
    matches nothing.
    """
    model = shard_model(config, plan, mesh, train.freeze, train.z_loss)
    fill_model(model, plan, device, seed)
    return model


def shard_model(
    config: LlamaConfig, plan: Plan, mesh: DeviceMesh, frozen: Sequence[str] = (), z_loss: float = 0.0
) -> Llama:
    """The first half of building: a model on the meta device with the plan applied to it. `frozen`: patterns
    of `train.freeze`; `z_loss`: as `train.z_loss`."""
    with torch.device("meta"):
        model = Llama(config)
    model.head.loss.z_loss = z_loss
    for parameter in model.parameters():  # not the buffers: RoPE's tables stay float32
        parameter.data = parameter.data.to(getattr(torch, plan.storage_dtype))
    freeze(model, frozen)
    apply_plan(model, plan, mesh)
    return model


def fill_model(
    model: Llama, plan: Plan, device: torch.device, seed: int, copy: Callable[..., None] = copy_shard
) -> None:
    """The second half: this rank's tensors, with initial values that `copy` puts into them, as in
    `init_weights`."""
    model.to_empty(device="cpu" if plan.cpu_offload else device)
    for name, buffer in model.named_buffers():  # all of them belong to the model itself
        setattr(model, name, buffer.to(device))
    init_weights(model, seed, copy)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training by fqn pattern, as in layers.0.* (their gradients are not even
    computed)."""
    for pattern in patterns:
        # A tied weight by either of its names.
        found = [
            p
            for name, p in model.named_parameters(remove_duplicate=False)
            if fnmatch.fnmatchcase(name, pattern)
        ]
        if not found:
            raise ConfigError(
                f"train.freeze: {pattern} matches no parameter; names are as tok_embeddings.weight or "
                "layers.0.*"
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"train.freeze={list(patterns)} leaves nothing to train")
