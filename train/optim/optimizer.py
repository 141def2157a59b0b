"""The optimizer of a config, and its learning-rate schedule."""

import inspect
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.errors import PlanError, first_of, place_of
from meshwright.parallel.model.kinds import kinds_of
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.parallel.structure import convert_fields
from meshwright.train.checkpoint.shards import dtype_name
from meshwright.train.config import GroupConfig, MuonConfig, OptimConfig
from meshwright.train.errors import ConfigError
from meshwright.train.optim.groups import UpdateGroup, make_groups
from meshwright.train.user_code import allow, find


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


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    seed: int = 0,
    blocks: Sequence[str] = (),
    mesh: DeviceMesh | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of a config, with the state of ours allocated, as zeros, so that a checkpoint can
    be loaded into it. Raises ConfigError, as make_groups, and if a function of the user's returns none.

    Args:
        seed: of the rounding of bfloat16 state
        blocks: of the model, as `Plan.blocks`; Muon's matrices are inside of them
        mesh: that the model is sharded over; None: one process has all of it
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kinds = kinds_of(model, blocks, config.muon.per_head)
    groups = make_groups({name: kinds[name] for name in named}, config)
    if ":" in config.name:
        return _of_user(config.name, [_of_one_kind(group, named, config) for group in groups], named)
    by_muon = [group for group in groups if group.by == "muon"]
    if config.name == "muon" and not by_muon:
        raise ConfigError(
            "optim.name=muon: no trained parameter is a matrix inside a block: name the blocks "
            "(model.blocks), or matrices by optim.groups, or use adamw"
        )
    others = [_torch_group(group, named, config) for group in groups if group.by == "adamw"]
    parts = [_adamw(others, named, config, seed)] if others else []
    if by_muon:
        parts.insert(0, _muon(by_muon, named, config, blocks, mesh))
    return parts[0] if len(parts) == 1 else Several(parts)


def optimizer(
    sharded: ShardedModel,
    name: str = "adamw",
    *,
    muon: Mapping[str, Any] | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    **keys: Any,
) -> torch.optim.Optimizer:
    """Return an optimizer of a sharded model for a loop of one's own, the same on every mesh.

    Args:
        name: as the key optim.name (docs/optimizers.md)
        muon: values of the keys optim.muon.*, such as {"per_head": True}
        groups: as the key optim.groups, such as {"layers.0.*": {"lr": 1e-4}}
        keys: of optim.*, such as lr, betas, weight_decay. A schedule is the loop's business: `lr` is the rate
            until it sets another

    Raises ConfigError for values that cannot be used.
    """
    try:
        rules = {pattern: GroupConfig(**rule) for pattern, rule in (groups or {}).items()}
        config = OptimConfig(name=name, muon=MuonConfig(**(muon or {})), groups=rules, **keys)
        convert_fields(config, "optim")
    except (TypeError, ValueError, PlanError) as error:
        raise ConfigError(f"mw.optimizer: {error}") from error
    allow([name])
    return build_optimizer(sharded.model, config, blocks=sharded.plan.blocks, mesh=sharded.mesh)


def _torch_group(group: UpdateGroup, named: Mapping[str, Tensor], config: OptimConfig) -> dict[str, Any]:
    """Return a group as torch's optimizers take it; lr_factor is read by `set_learning_rate`."""
    numbers = {"lr": group.lr, "weight_decay": group.weight_decay}
    factor = group.lr / config.lr if config.lr else 1.0
    return {"params": [named[name] for name in group.kinds], **numbers, "lr_factor": factor}


def _adamw(
    groups: list[dict[str, Any]], named: Mapping[str, Tensor], config: OptimConfig, seed: int
) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, or RoundedAdamW if parameters or moments are bfloat16."""
    trained = [p for group in groups for p in group["params"]]
    groups = [{**group, "betas": config.betas, "eps": config.eps} for group in groups]
    optimizer: torch.optim.Optimizer
    if {config.state_dtype, *(str(p.dtype).removeprefix("torch.") for p in trained)} == {"float32"}:
        optimizer = torch.optim.AdamW(groups, fused=True)
    else:
        from meshwright.train.optim.stochastic_adamw import RoundedAdamW

        keys = {p: zlib.crc32(f"{seed}:{name}".encode()) for name, p in named.items()}
        optimizer = RoundedAdamW(groups, keys)
    for p in trained:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, dtype=getattr(torch, config.state_dtype)),
            "exp_avg_sq": torch.zeros_like(p, dtype=getattr(torch, config.state_dtype)),
        }
    return optimizer


def _muon(
    groups: Sequence[UpdateGroup],
    named: Mapping[str, Tensor],
    config: OptimConfig,
    blocks: Sequence[str],
    mesh: DeviceMesh | None,
) -> torch.optim.Optimizer:
    from meshwright.train.optim.muon import Muon, Owned  # late: few need it

    kinds = {name: kind for group in groups for name, kind in group.kinds.items()}
    ours = {name: p for name, p in named.items() if name in kinds}
    if narrow := [name for name, p in ours.items() if p.dtype != torch.float32]:
        raise ConfigError(
            f"optim.name=muon: {narrow[0]} is stored in {dtype_name(ours[narrow[0]].dtype)}, in which its "
            "updates would be rounded away: store it in float32, or use adamw"
        )
    device = mesh.device_type if mesh else next(iter(ours.values())).device.type
    dtype = config.muon.newton_schulz_dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    owned = Owned(blocks, mesh, getattr(torch, dtype), device)
    torch_groups = [_torch_group(group, named, config) for group in groups]
    return Muon(torch_groups, ours, kinds, owned, config.muon.adjust_lr_fn, config.muon.momentum)


def _of_one_kind(group: UpdateGroup, named: Mapping[str, Tensor], config: OptimConfig) -> dict[str, Any]:
    (kind,) = {each.kind for each in group.kinds.values()}
    return _torch_group(group, named, config) | {"kind": kind}


def _of_user(name: str, groups: list[dict[str, Any]], named: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """Return what a function of the user's makes of the groups of all these parameters."""
    function = find("optim.name", name)
    try:
        optimizer = function(groups)
    except Exception as error:
        raise ConfigError(f"optim.name={name}: {type(error).__name__}: {error}{place_of(error)}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optim.name={name} returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    if left_out := [each for each, p in named.items() if p not in updated]:
        raise ConfigError(
            f"optim.name={name}: {type(optimizer).__name__} has not all that is trained: "
            f"{first_of(left_out)}: give it all groups, or exclude these by train.freeze"
        )
    if _needs_closure(optimizer):
        raise ConfigError(
            f"optim.name={name}: {type(optimizer).__name__} computes the loss several times in a step, which "
            "train.main does once: use it in a loop of your own"
        )
    optimizer.saves_numbers = True  # type: ignore[attr-defined]  # of its groups too (training_tensors)
    return optimizer


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Several(torch.optim.Optimizer):
    """Optimizers of different parameters as one, with the groups and the state of all of them."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = [*parts]
        self._step_supports_amp_scaling = all(map(knows_scale, parts))
        for part in parts:
            self.state.update(part.state)
        self._share()

    def _share(self) -> None:
        """Make groups and state those of the parts too, which may have been replaced by loaded ones."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "parts"):
            self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do the step of each. `grad_scale` and `found_inf` are for all of them."""
        for part in self.parts:
            for name in ("grad_scale", "found_inf"):
                setattr(part, name, getattr(self, name, None))
            part.step()


def describe_waits(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a line if every step of an optimizer waits for the device."""
    if knows_scale(optimizer):
        return []
    return [
        f"optimizer: {type(optimizer).__name__} knows no grad_scale and found_inf, as torch.amp.GradScaler "
        "sets: gradients are clipped before it, and each step waits once for the device, which says whether "
        "it is skipped"
    ]


def knows_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step divides gradients by its attribute `grad_scale` and changes nothing if
    `found_inf` is 1, both on the device, as torch.amp.GradScaler asks."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, which is `lr` for groups without a rate of their own."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
