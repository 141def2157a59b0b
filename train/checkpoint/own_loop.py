"""Checkpoints for a training loop of one's own: any model with a plan applied, any torch.optim."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.checkpoint.load import find_checkpoint, load_checkpoint, put_damaged_aside
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import CheckpointConfig
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.errors import SaveError

EXTRA = "extra.json"


def save(
    folder: str | Path,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Save model, optimizer and random state as `folder`/step-N, which is whole and verified, or not there.
    Every rank calls it. Returns the checkpoint's path.

    Args:
        step: optimizer steps done
        extra: plain data for JSON, such as the position in the data
        keep: newest checkpoints to keep; 0 keeps all

    Raises SaveError on all ranks if one fails.
    """
    config = CheckpointConfig(asynchronous=False, keep=keep)
    texts = {"plan.yaml": plan_to_yaml(sharded.plan), EXTRA: json.dumps(dict(extra or {}))}
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
    """Load the newest intact checkpoint of `folder`, of any mesh, into model and optimizer. Every rank calls
    it. Returns the step and the `extra` that it was saved with; None if there is no checkpoint.

    The model's tensors must be allocated (`materialize` or `load_weights`). Raises CheckpointError if the
    checkpoint is of another model or optimizer.
    """
    start = find_checkpoint(CheckpointConfig(), Path(folder), ranks := read_rank_info())
    put_damaged_aside(start, ranks)
    if start.checkpoint is None or start.manifest is None:
        return None
    create_state(sharded.model, optimizer)
    load_checkpoint(start.checkpoint, start.manifest, sharded.model, optimizer)
    extra = json.loads((start.checkpoint / EXTRA).read_text(encoding="utf-8"))
    return start.manifest.position.step, extra


def create_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create its state, which most do in their first step."""
    if not optimizer.state:
        get_optimizer_state_dict(model, optimizer)  # takes a step with gradients of zero and a rate of zero
