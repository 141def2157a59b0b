"""The training state: model and optimizer, with the values that a run starts with."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from meshwright.train.checkpoint.huggingface import Origin, beside_weights, read_origin
from meshwright.train.checkpoint.initial_weights import Weights, describe_start, load_weights
from meshwright.train.checkpoint.load import Start, load_checkpoint
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import CheckpointConfig, Config
from meshwright.train.console import Console
from meshwright.train.data.corpus import find_tokenizer_file
from meshwright.train.data.training_data import TrainingData


@dataclass(frozen=True)
class TrainState:
    """Model and optimizer, which are updated in place, and the `position` in the run at which they start."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    position: TrainPosition


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    start: Start,
    weights: Weights | None,
    config: CheckpointConfig,
    data: TrainingData,
    console: Console,
) -> TrainState:
    """Load the checkpoint that the run resumes from, or the weights of `checkpoint.init_from`; without either
    keep the initial weights. Raises CheckpointError."""
    console.print_lines(describe_start(config.init_from, start.checkpoint))
    if start.checkpoint and start.manifest:
        load_checkpoint(start.checkpoint, start.manifest, model, optimizer)
        changes = list(start.changes)
        if not data.same_order(start.manifest.position):
            changes += ["data order (by seed, length or text), which restarts from the beginning"]
        if changes:
            console.print(f"changed since the checkpoint: {', '.join(changes)}")
        console.print(f"resumed from {start.checkpoint}: step {start.step} of {data.total_steps} is done")
    elif weights:
        load_weights(weights, model, config.verify)
        for name, rows in weights.padded.items():
            console.print(f"weights: {name} has {rows} rows, and is padded with their mean")
    return TrainState(model, optimizer, data.start)


def files_beside(
    config: Config, data: TrainingData, start: Start, weights: Weights | None, console: Console
) -> dict[str, bytes]:
    """Return the files that each checkpoint keeps for its use without the data. What cannot be read is left
    out with a warning, because the run does not need it."""
    folders = [Path(each).expanduser() for each in (start.checkpoint, config.checkpoint.init_from) if each]
    rows = weights.padded if weights else {}
    padded = {fqn: rows[name] for fqn, name in weights.names.items() if name in rows} if weights else {}
    origin = Origin(data.corpus.tokenizer, {**padded, **(read_origin(folders[0]).padded if folders else {})})
    try:
        file = find_tokenizer_file(config.data)
        return beside_weights(origin, file, [*folders, *([file.parent] if file else [])])
    except (OSError, ValueError) as error:
        console.print(f"warning: checkpoints do not keep the tokenizer: {error}")
        return beside_weights(origin, None, [])
