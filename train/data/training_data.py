"""All that a run learns from, ready to be read: which sequences, in which order, in what batches, how many
steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.mesh import data_parallel_group, data_parallel_rank
from meshwright.parallel.plan.schema import Plan
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import Config
from meshwright.train.data.corpus import Corpus, check_evaluation, check_sequences, load_together
from meshwright.train.data.loader import BatchShape, StepData, TrainLoader
from meshwright.train.data.sample_order import SampleOrder, data_progress
from meshwright.train.data.sequences import SequenceShape, make_sequence_shape
from meshwright.train.data.token_store import TokenStream
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.planning.run_plan import RunPlan


@dataclass(frozen=True)
class TrainingData:
    """The same on every rank, but for the rank's part of each batch.

    Args:
        corpus: tokens to train on and to evaluate
        sequences: how they are cut into sequences
        order: which sequence stands at which position
        batch: how a global batch is cut, and this rank's part
        group: the data-parallel ranks
        device: of this process
        total_steps: optimizer steps of the whole run
    """

    corpus: Corpus
    sequences: SequenceShape
    order: SampleOrder
    batch: BatchShape
    group: dist.ProcessGroup
    device: torch.device
    total_steps: int

    @property
    def evaluated(self) -> dict[str, TokenStream]:
        """What evaluations are of, by name."""
        return {**self.corpus.held_out, **self.corpus.validation}

    def load_from(self, position: TrainPosition, ahead: int) -> TrainLoader:
        """This rank's micro batches from there on, endless; of at most `ahead` steps beforehand."""
        return TrainLoader(self.order, self.sequences, self.batch, position.samples, self.device, ahead)

    def advance(self, position: TrainPosition) -> TrainPosition:
        """Where the run is one optimizer step later."""
        return TrainPosition(
            step=position.step + 1,
            samples=position.samples + self.batch.global_batch_size,
            seed=self.order.seed,
            seq_len=self.sequences.seq_len,
            world_size=dist.get_world_size(),
            data=self.corpus.fingerprint,
        )

    def same_order(self, position: TrainPosition) -> bool:
        """Whether the samples that were counted there are those of this run."""
        same = position.data in (self.corpus.fingerprint, "")  # "": from a version that did not note it
        return same and (position.seed, position.seq_len) == (self.order.seed, self.sequences.seq_len)

    def describe_step(self, position: TrainPosition, step: StepData) -> dict[str, Any]:
        """What a row of metrics says of the data: how far it is used, and the hash of the step's sequences
        and their places in the order, over all ranks: the same on every mesh. Every rank calls it."""
        data_hash = torch.tensor(step.data_hash, device=self.device)
        dist.all_reduce(data_hash, group=self.group)
        return {**data_progress(self.order, position.samples), "data_hash": f"{data_hash.item():016x}"}


def load_training_data(
    config: Config, planned: RunPlan, mesh: DeviceMesh, ranks: RankInfo, resume_from: Path | None
) -> TrainingData:
    """Tokenise what is not prepared, check it, and lay it out; every rank calls it. Raises DataError, on all
    ranks alike."""
    plan, train, corpus = planned.plan, config.train, load_together(config.data, ranks, resume_from)
    sequences = make_sequence_shape(config.data, corpus.tokenizer, train.seq_len, config.model.vocab_size)
    counts = [check_sequences(source.split, sequences, source.name) for source in corpus.sources]
    if train.eval_every:
        check_evaluation(corpus)
    of_epochs = max(1, int(train.epochs * sum(counts)) // plan.global_batch_size)
    return TrainingData(
        corpus=corpus,
        sequences=sequences,
        order=SampleOrder(corpus.sources, sequences, config.run.seed),
        batch=make_batch_shape(plan, mesh),
        group=data_parallel_group(mesh),
        device=planned.device,
        total_steps=of_epochs if train.epochs else train.steps,
    )


def make_batch_shape(plan: Plan, mesh: DeviceMesh) -> BatchShape:
    """How this rank takes part in the plan's batches."""
    rank = data_parallel_rank(mesh, plan.mesh)
    return BatchShape(plan.micro_batch_size, plan.accumulation, rank, plan.mesh.data_parallel)
