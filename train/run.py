"""The parts of a run, from which its hooks are made, and yours."""

from dataclasses import dataclass
from pathlib import Path

from meshwright.train.config import Config
from meshwright.train.console import Console
from meshwright.train.data.training_data import TrainingData
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.hooks import is_due
from meshwright.train.planning.run_plan import RunPlan
from meshwright.train.training import Training


@dataclass(frozen=True)
class Run:
    """A run that is about to train.

    Args:
        config: the whole configuration
        planned: its plan and the device of this process
        training: model, optimizer and loss
        data: what it trains on, and where it starts (`data.start`)
        folder: of the run
        ranks: of this process
        console: prints lines, on rank 0 only
    """

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
        """Whether a row of metrics is written after a step."""
        every = self.config.metrics.every, self.config.train.eval_every
        return any(is_due(each, step, step == self.data.total_steps) for each in every)
