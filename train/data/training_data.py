"""The training data of a run: corpus, sequences, sample order, batch shape and number of steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.mesh import context_rank, data_parallel_group, data_parallel_rank
from meshwright.parallel.plan.schema import Plan
from meshwright.train.checkpoint.load import Start
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import Config
from meshwright.train.data.corpus import Corpus, check_evaluation, check_sequences, load_on_all_ranks
from meshwright.train.data.loader import BatchShape, StepData, TrainLoader
from meshwright.train.data.sample_order import SampleOrder, data_progress
from meshwright.train.data.sequences import SequenceShape, make_sequence_shape
from meshwright.train.data.token_store import TokenStream
from meshwright.train.distributed.process_group import group_timeout
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.run_plan import RunPlan


@dataclass(frozen=True)
class TrainingData:
    """The training data of a run; the same on every rank except for the rank's part of each batch.

    Args:
        corpus: tokens of training and evaluation
        sequences: how documents become sequences
        order: the sequence at each position
        batch: how a global batch is divided, and this rank's part
        group: the data-parallel ranks
        device: of this process
        steps: `train.steps`
        asked: sequences of `train.epochs`, which count instead of steps; 0: steps count
        start: the position at which this process begins to train
    """

    corpus: Corpus
    sequences: SequenceShape
    order: SampleOrder
    batch: BatchShape
    group: dist.ProcessGroup
    device: torch.device
    steps: int
    asked: int
    start: TrainPosition

    @property
    def total_steps(self) -> int:
        """The number of the run's last optimizer step. With `train.epochs` it follows from the sequences that
        are left: those so far may have been trained with another global batch size."""
        left = math.ceil((self.asked - self.start.samples) / self.batch.global_batch_size)
        return self.start.step + max(0, left) if self.asked else self.steps

    @property
    def schedule(self) -> tuple[int, float]:
        """`total_steps`, and the steps by which the schedule is behind: with `train.epochs` it follows the
        sequences, in steps of this global batch size. 0 unless the batch size or the data has changed."""
        behind = self.start.step - self.start.samples / self.batch.global_batch_size
        return self.total_steps, behind if self.asked else 0.0

    @property
    def evaluated(self) -> dict[str, TokenStream]:
        """The evaluation sets by name."""
        return {**self.corpus.held_out, **self.corpus.validation}

    def load_from(self, position: TrainPosition, ahead: int) -> TrainLoader:
        """Return a loader of this rank's micro batches from `position` on, at most `ahead` steps ahead."""
        return TrainLoader(self.order, self.sequences, self.batch, position.samples, self.device, ahead)

    def advance(self, position: TrainPosition, steps: int = 1) -> TrainPosition:
        """Return the position that many optimizer steps later."""
        return TrainPosition(
            step=position.step + steps,
            samples=position.samples + steps * self.batch.global_batch_size,
            seed=self.order.seed,
            seq_len=self.sequences.seq_len,
            world_size=dist.get_world_size(),
            data=self.corpus.fingerprint,
        )

    def same_order(self, position: TrainPosition) -> bool:
        """Whether the sample order of a saved position is that of this run."""
        current = self.corpus.fingerprint, self.order.seed, self.sequences.seq_len
        return (position.data, position.seed, position.seq_len) == current

    def describe_step(self, position: TrainPosition, step: StepData) -> dict[str, Any]:
        """Return the data columns of a metrics row: progress, and the hash of the step's sequences and their
        positions in the sample order over all ranks, the same on every mesh. Every rank must call it."""
        data_hash = torch.tensor(step.data_hash, device=self.device)
        dist.all_reduce(data_hash, group=self.group)
        return {**data_progress(self.order, position.samples), "data_hash": f"{data_hash.item():016x}"}


def load_training_data(
    config: Config,
    planned: RunPlan,
    mesh: DeviceMesh,
    ranks: RankInfo,
    start: Start,
    print_: Callable[[str], None],
) -> TrainingData:
    """Load the training data; raw text is tokenized first. Collective: every rank must call it. `print_`:
    prints a line on rank 0.

    Raises the same DataError on every rank.
    """
    plan, train = planned.plan, config.train
    corpus = load_on_all_ranks(config.data, ranks, start.checkpoint, print_)
    sequences = make_sequence_shape(
        config.data, corpus.tokenizer, train.seq_len, model_of(config.model).vocab_size
    )
    counts = [check_sequences(source.split, sequences, source.name) for source in corpus.sources]
    if train.eval_every:
        check_evaluation(corpus)
    data = TrainingData(
        corpus=corpus,
        sequences=sequences,
        order=SampleOrder(corpus.sources, sequences, config.run.seed),
        batch=make_batch_shape(plan, mesh),
        group=data_parallel_group(mesh, group_timeout(config.run)),
        device=planned.device,
        steps=train.steps,
        asked=max(1, round(train.epochs * sum(counts))) if train.epochs else 0,
        start=TrainPosition(),
    )
    saved = start.manifest.position if start.manifest else TrainPosition()
    return replace(data, start=saved if data.same_order(saved) else replace(saved, samples=0))


def make_batch_shape(plan: Plan, mesh: DeviceMesh) -> BatchShape:
    """Return how the plan divides a global batch, and this rank's part."""
    return BatchShape(
        plan.micro_batch_size,
        plan.accumulation,
        data_parallel_rank(mesh, plan.mesh),
        plan.mesh.data_parallel,
        context_rank(mesh, plan.mesh),
        plan.mesh.cp,
        plan.context.exchange,
    )
