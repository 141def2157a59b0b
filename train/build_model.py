"""Build the sharded model with its initial weights."""

import fnmatch
from collections.abc import Callable, Sequence
from datetime import timedelta

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
    config: LlamaConfig,
    train: TrainConfig,
    plan: Plan,
    mesh: DeviceMesh,
    device: torch.device,
    seed: int,
    group_timeout: timedelta | None = None,
) -> Llama:
    """Return the sharded model with initial weights, built on the meta device and filled one parameter at a
    time, so that no rank ever holds the full model.

    With `plan.cpu_offload` parameters are in host memory. `group_timeout`: as in apply_fsdp. Raises
    ConfigError if a pattern of `train.freeze` matches no parameter, or if all parameters are frozen.
    """
    model = shard_model(config, plan, mesh, train.freeze, train.z_loss, group_timeout)
    fill_model(model, plan, device, seed)
    return model


def shard_model(
    config: LlamaConfig,
    plan: Plan,
    mesh: DeviceMesh,
    frozen: Sequence[str] = (),
    z_loss: float = 0.0,
    group_timeout: timedelta | None = None,
) -> Llama:
    """First half of `build_model`: return a model on the meta device with the plan applied. `frozen`:
    patterns of `train.freeze`; `z_loss`: as `train.z_loss`."""
    with torch.device("meta"):
        model = Llama(config)
    model.head.loss.z_loss = z_loss
    for parameter in model.parameters():  # not the buffers: the RoPE tables stay float32
        parameter.data = parameter.data.to(getattr(torch, plan.storage_dtype))
    freeze(model, frozen)
    apply_plan(model, plan, mesh, gradients="sum", group_timeout=group_timeout)
    return model


def fill_model(
    model: Llama, plan: Plan, device: torch.device, seed: int, copy: Callable[..., None] = copy_shard
) -> None:
    """Second half of `build_model`: allocate this rank's tensors and write initial values with `copy`, as
    `init_weights` does. The memory of the full tensors that this needs returns to the GPU."""
    model.to_empty(device="cpu" if plan.cpu_offload else device)
    for name, buffer in model.named_buffers():  # all buffers are attributes of the root module
        setattr(model, name, buffer.to(device))
    init_weights(model, seed, copy)
    torch.cuda.empty_cache()  # does nothing without a GPU


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
