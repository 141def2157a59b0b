"""Checkpoints for a training loop of one's own: any model with a plan applied, any torch.optim."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.parallel.structure import convert_fields
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.reader import load_checkpoint
from meshwright.train.checkpoint.resume import find_checkpoint, put_damaged_aside
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import CheckpointConfig
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.errors import CheckpointError, SaveError
from meshwright.train.model.trained_model import texts_of

EXTRA, OPTIMIZER = "extra.json", "optimizer.json"


def save(
    folder: str | Path,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int = 0,
) -> Path:
    """Save model, optimizer (its state, and the numbers of its parameter groups, such as lr) and random state
    as `folder`/step-N, which is whole and verified, or not there. Every rank calls it. Returns its path.

    Args:
        step: optimizer steps done
        extra: plain data for JSON, such as the position in the data, or a schedule's state_dict
        keep: newest checkpoints of the folder to keep; 0 keeps all

    Raises SaveError on all ranks if one fails, and if the folder has a checkpoint of this step or a later
    one, which is of another training or should have been loaded. Nothing is deleted then.
    """
    sharded.settle()
    config = CheckpointConfig(asynchronous=False, keep=keep)
    convert_fields(config, "mw.save")
    texts = {"plan.yaml": plan_to_yaml(sharded.plan), EXTRA: json.dumps(dict(extra or {}))}
    texts |= texts_of(sharded.model)
    texts[OPTIMIZER] = json.dumps(groups_of(sharded.model, optimizer), default=Tensor.tolist)
    saver = CheckpointSaver(config, Path(folder), sharded.model, optimizer, sharded.mesh, texts)
    try:
        saver.save(TrainPosition(step=step, world_size=dist.get_world_size()))
        (saved,) = saver.poll()
    finally:
        saver.close()
    if saved.path is None:
        raise SaveError(saved.error)
    return saved.path


def load(
    folder: str | Path, sharded: ShardedModel, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest intact checkpoint of `folder`, of any mesh, into model and optimizer: the parameters,
    the optimizer's state as it was, and the numbers of its parameter groups (set others afterwards). Every
    rank calls it. Returns the step and the `extra` that it was saved with; None if there is no checkpoint.
    Warns of checkpoints that it skipped, because they are damaged.

    The model's tensors must be allocated (`materialize` or `load_weights`). Raises CheckpointError if the
    checkpoint is of another model, or of an optimizer with other groups of parameters.
    """
    sharded.settle()
    start = find_checkpoint(CheckpointConfig(), Path(folder), ranks := read_rank_info(has_group=True))
    for line in put_damaged_aside(start, ranks):
        warnings.warn(line, stacklevel=2)
    if start.checkpoint is None or start.manifest is None:
        return None
    if not any(name.startswith("optim.") for name in start.manifest.tensors):
        optimizer.state.clear()  # saved before the first step
    load_checkpoint(start.checkpoint, start.manifest, sharded.model, optimizer, sharded.mesh)
    if OPTIMIZER in start.manifest.files:
        set_groups(start.checkpoint / OPTIMIZER, sharded.model, optimizer)
    known = EXTRA in start.manifest.files  # not in a checkpoint of train.main
    text = (start.checkpoint / EXTRA).read_text(encoding="utf-8") if known else "{}"
    return start.manifest.position.step, json.loads(text)


def set_groups(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set the numbers of the parameter groups. Raises CheckpointError if the groups are others."""
    saved, current = json.loads(file.read_text(encoding="utf-8")), groups_of(model, optimizer)
    if [group["parameters"] for group in saved] != [group["parameters"] for group in current]:
        raise CheckpointError(f"{file} has other groups than the optimizer: use those it was saved with")
    for group, numbers in zip(optimizer.param_groups, saved, strict=True):
        for key, number in numbers["numbers"].items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(torch.tensor(number))
            else:
                group[key] = tuple(number) if isinstance(number, list) else number


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what optimizer.json contains: the names of each group's parameters, and the group's numbers,
    such as lr, betas and weight_decay, but not switches such as fused."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        parameters, others = [names[each] for each in group["params"]], group.keys() - {"params"}
        numbers = {key: group[key] for key in sorted(others) if _is_numbers(group[key])}
        groups.append({"parameters": parameters, "numbers": numbers})
    return groups


def _is_numbers(value: Any) -> bool:
    values = value if isinstance(value, tuple | list) else [value]
    return all(isinstance(each, int | float | Tensor) and not isinstance(each, bool) for each in values)
