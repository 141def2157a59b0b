"""The training state: model and optimizer, with the values that a run starts with."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.parallel.plan.schema import ShardableModel
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.checkpoint.huggingface import Origin, beside_weights, read_origin
from meshwright.train.checkpoint.initial_weights import Weights, describe_start, load_weights
from meshwright.train.checkpoint.load import Start, load_checkpoint
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import Config
from meshwright.train.console import Console
from meshwright.train.data.corpus import find_tokenizer_file
from meshwright.train.data.training_data import TrainingData


@dataclass(frozen=True)
class TrainState:
    """Model and optimizer, which are updated in place, and the `position` in the run at which they start."""

    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    position: TrainPosition


def restore(
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    start: Start,
    weights: Weights | None,
    config: Config,
    data: TrainingData,
    console: Console,
) -> TrainState:
    """Load the checkpoint that the run resumes from, or the weights of `checkpoint.init_from`; without either
    keep the initial weights. Raises CheckpointError.

    Dropout draws other numbers on each data-parallel rank, the same ones on the ranks of a cp or tp group.
    """
    console.print_lines(describe_start(config.checkpoint.init_from, start.checkpoint))
    torch.manual_seed(zlib.crc32(f"{config.run.seed}:{start.step}:{sharded.data_rank}".encode()))
    if start.checkpoint and start.manifest:
        goes_on = load_checkpoint(start.checkpoint, start.manifest, sharded.model, optimizer, sharded.mesh)
        changes = list(start.changes)
        if not goes_on and not isinstance(sharded.model, ShardableModel):  # our Llama draws none
            changes.append("the mesh, so that dropout draws other numbers")
        if not data.same_order(start.manifest.position):
            changes += ["data order (by seed, length or text), which restarts from the beginning"]
        if changes:
            console.print(f"changed since the checkpoint: {', '.join(changes)}")
        console.print(f"resumed from {start.checkpoint}: step {start.step} of {data.total_steps} is done")
    elif weights:
        load_weights(weights, sharded.model, config.checkpoint.verify)
        for name, rows in weights.padded.items():
            console.print(f"weights: {name} has {rows} rows, and is padded with their mean")
    return TrainState(sharded, optimizer, data.start)


def files_beside(
    config: Config, data: TrainingData, start: Start, weights: Weights | None, console: Console
) -> dict[str, bytes]:
    """Return the files that each checkpoint keeps for its use without the data. What cannot be read is left
    out with a warning, because the run does not need it."""
    folders = [Path(each).expanduser() for each in (start.checkpoint, config.checkpoint.init_from) if each]
    names, rows = (weights.names, weights.padded) if weights else ({}, {})
    padded = {fqn: rows[name] for fqn, name in names.items() if name in rows}
    origin = Origin(data.corpus.tokenizer, {**padded, **(read_origin(folders[0]).padded if folders else {})})
    try:
        file = find_tokenizer_file(config.data)
        return beside_weights(origin, file, [*folders, *([file.parent] if file else [])])
    except (OSError, ValueError) as error:
        console.print(f"warning: checkpoints do not keep the tokenizer: {error}")
        return beside_weights(origin, None, [])
