"""AdamW and its learning-rate schedule."""

import math
import zlib

import torch
from torch import nn

from meshwright.train.config import OptimConfig
from meshwright.train.errors import ConfigError
from meshwright.train.user_code import find


def learning_rate(config: OptimConfig, step: int, total_steps: int, shift: float = 0.0) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1 to `total_steps`; after the warm-up
    the schedule is `shift` steps behind (`TrainingData.schedule`). Raises ConfigError if a schedule of the
    user's gives no rate."""
    if ":" in config.schedule:
        factor = find("optim.schedule", config.schedule)(step, total_steps)
        if not (isinstance(factor, int | float) and 0 <= factor < math.inf):
            raise ConfigError(
                f"optim.schedule={config.schedule} returned {factor!r} for step {step} of {total_steps}: it "
                "must be a finite number, at least 0, that is multiplied by optim.lr"
            )
        return config.lr * factor
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    length = total_steps - shift
    decay_steps = max(1, length - config.warmup_steps)
    if config.schedule == "wsd":
        decay_steps = max(1, min(decay_steps, round(length * config.decay_ratio)))
    done = min(1.0, max(0.0, (step - (total_steps - decay_steps)) / decay_steps))
    if config.schedule == "constant":
        return config.lr
    shape = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def describe_short_run(config: OptimConfig, steps: int, sequences: int, batch: int) -> list[str]:
    """Return a line for each of warm-up, decay and epoch that a run of `steps` steps of `batch` sequences,
    `sequences` in an epoch, is too short for."""
    warmup, decay, lines = config.warmup_steps, round(steps * config.decay_ratio), []
    if ":" in config.schedule:
        pass  # of yours, which has no warm-up
    elif warmup >= steps:
        reached = f"the learning rate rises to {steps / warmup:.0%} of optim.lr and does not decay"
        lines.append(f"optim.warmup_steps={warmup}, but the run has {steps} steps: {reached}")
    elif config.schedule == "wsd" and decay > steps - warmup:
        left = f"only {steps - warmup} follow the warm-up: the decay has these"
        lines.append(f"optim.decay_ratio={config.decay_ratio} is {decay} of {steps} steps, but {left}")
    if batch > sequences:
        lines.append(f"an epoch has {sequences} sequences, so a step of {batch} trains some of them twice")
    return [f"warning: {line}" for line in lines]


def build_optimizer(model: nn.Module, config: OptimConfig, seed: int = 0) -> torch.optim.Optimizer:
    """Return AdamW with two parameter groups, with and without weight decay: torch's fused AdamW, or
    RoundedAdamW if parameters or moments are bfloat16, whose rounding depends on `seed`.

    The moments are allocated immediately, as zeros, so that a checkpoint can be loaded into them.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    decay = [p for p in trained if p.dim() > 1 and id(p) not in embeddings]
    no_decay = [p for p in trained if p.dim() <= 1 or id(p) in embeddings]
    common = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    groups = [
        {"params": decay, "weight_decay": config.weight_decay, **common},
        {"params": no_decay, "weight_decay": 0.0, **common},
    ]
    optimizer: torch.optim.Optimizer
    if {config.state_dtype, *(str(p.dtype).removeprefix("torch.") for p in trained)} == {"float32"}:
        optimizer = torch.optim.AdamW(groups, fused=True)
    else:
        from meshwright.train.optim.stochastic_adamw import RoundedAdamW

        optimizer = RoundedAdamW(
            groups, {p: zlib.crc32(f"{seed}:{name}".encode()) for p, name in trained.items()}
        )
    for p in trained:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, dtype=getattr(torch, config.state_dtype)),
            "exp_avg_sq": torch.zeros_like(p, dtype=getattr(torch, config.state_dtype)),
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
