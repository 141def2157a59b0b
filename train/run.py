"""The parts of a run, from which its hooks are made, and what they start with."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.parallel.plan.schema import ShardableModel
from meshwright.train.checkpoint.layout import STATE
from meshwright.train.checkpoint.manifest import Origin, beside_weights, read_origin
from meshwright.train.checkpoint.resume import Start, describe_start
from meshwright.train.config import Config
from meshwright.train.console import Console
from meshwright.train.data.corpus import find_tokenizer_file
from meshwright.train.data.training_data import TrainingData
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.hooks import is_due
from meshwright.train.planning.run_plan import RunPlan
from meshwright.train.training import Training

if TYPE_CHECKING:
    from meshwright.train.checkpoint.initial_weights import Weights


@dataclass(frozen=True)
class Run:
    """A run that is about to train, from `data.start` on. `console` prints lines, on rank 0 only."""

    config: Config
    planned: RunPlan
    training: Training
    data: TrainingData
    folder: Path
    ranks: RankInfo
    console: Console

    @property
    def steps(self) -> range:
        """The steps of this process, counted from 1."""
        return range(self.data.start.step + 1, self.data.total_steps + 1)

    def is_reported(self, step: int) -> bool:
        """Whether a row of metrics is written after a step: also after an evaluation, whose scores it has."""
        every = self.config.metrics.every, self.config.train.eval_every
        return any(is_due(each, step, step == self.data.total_steps) for each in every)


def restore(
    training: Training,
    start: Start,
    weights: "Weights | None",
    config: Config,
    data: TrainingData,
    console: Console,
) -> None:
    """Load the checkpoint that the run resumes from, or the weights of `checkpoint.init_from`; without either
    keep the initial weights. Raises CheckpointError.
    """
    sharded, optimizer = training.sharded, training.optimizer
    console.print_lines(describe_start(config.checkpoint.init_from, start.checkpoint))
    # dropout draws other numbers on each data-parallel rank, the same ones on the ranks of a cp or tp group
    torch.manual_seed(zlib.crc32(f"{config.run.seed}:{start.step}:{sharded.data_rank}".encode()))
    if start.checkpoint and start.manifest:
        from meshwright.train.checkpoint.reader import load_checkpoint  # late: only a resume reads one

        parts = sharded.model, optimizer, sharded.mesh
        random_restored = load_checkpoint(start.checkpoint, start.manifest, *parts)
        changes = list(start.changes)
        if not random_restored and not isinstance(sharded.model, ShardableModel):  # our Llama draws none
            changes.append("the mesh, so that dropout draws other numbers")
        if not data.same_order(start.manifest.position):
            changes += ["data order (by seed, length or text), which restarts from the beginning"]
        if changes:
            console.print(f"changed since the checkpoint: {', '.join(changes)}")
        console.print(f"resumed from {start.checkpoint}: step {start.step} of {data.total_steps} is done")
    elif weights:
        from meshwright.train.checkpoint.initial_weights import load_weights  # late: few runs have them

        load_weights(weights, sharded.model, config.checkpoint.verify)
        console.print_lines(weights.describe())


def load_states(start: Start, states: Mapping[str, Tensor]) -> list[str]:
    """Read the state of hooks (`hooks.state_of`) from the checkpoint that a run resumes from, in place; all
    ranks call it. Returns a line about hooks whose state is only in the checkpoint, or only in the run.
    Raises CheckpointError."""
    if start.checkpoint is None or start.manifest is None:
        return []
    from meshwright.train.checkpoint.reader import load_tensors  # late, as above

    saved = {name for name in start.manifest.tensors if name.startswith(STATE)}
    load_tensors(start.checkpoint, start.manifest, {name: states[name] for name in saved if name in states})
    lines = []
    for names, problem in (
        (states.keys() - saved, "begins anew, because the checkpoint has none"),
        (saved - states.keys(), "is in the checkpoint, but not used: no hook of this run has it"),
    ):
        hooks = sorted({name.removeprefix(STATE).partition(".")[0] for name in names})
        lines += [f"warning: the state of {', '.join(hooks)} {problem}"] if hooks else []
    return lines


def files_beside(
    config: Config, data: TrainingData, start: Start, weights: "Weights | None", console: Console
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
