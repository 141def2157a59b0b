"""The training data of a run: corpus, sequences, sample order, batch shape and number of steps; and a thread
that loads batches ahead of the step.

Shapes: G sequences of the global batch, B of a micro batch, T tokens.
"""

import math
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.mesh import context_rank, data_parallel_group, data_parallel_rank
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.sharded_model import token_positions
from meshwright.train.background import BackgroundThread
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.resume import Start
from meshwright.train.config import Config
from meshwright.train.data.corpus import Corpus, check_evaluation, check_sequences, load_on_all_ranks
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import Batch, SequenceShape, StepData, at_positions, make_sequence_shape
from meshwright.train.distributed.process_group import group_timeout
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.model.trained_model import model_of
from meshwright.train.optim.optimizer import describe_short_run
from meshwright.train.planning.run_plan import RunPlan

if TYPE_CHECKING:
    from meshwright.train.data.given import GivenOrder

# a step's batches, their hash, and the event after which they are on the GPU
_Ready = tuple[list[Batch], int, torch.cuda.Event | None]


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is divided: rank `data_rank` of `data_parallel` reads `accumulation` micro batches
    of `micro_batch_size` sequences, and rank `context_rank` of `context_parallel` holds its tokens of them.

    `exchange`: of context parallelism (`ContextPlan`)."""

    micro_batch_size: int
    accumulation: int
    data_rank: int
    data_parallel: int
    context_rank: int = 0
    context_parallel: int = 1
    exchange: str = "heads"

    @property
    def global_batch_size(self) -> int:
        """Sequences of an optimizer step over all ranks."""
        return self.micro_batch_size * self.accumulation * self.data_parallel

    def local_tokens(self, batch: Batch) -> Batch:
        """Return this rank's tokens of a batch of whole sequences."""
        if self.context_parallel == 1:
            return batch
        seq_len = batch.tokens.shape[1]
        return at_positions(
            batch, token_positions(self.exchange, self.context_parallel, self.context_rank, seq_len)
        )


class TrainLoader:
    """Endless micro batches of this rank for every optimizer step from position `first_sample` on.

    At most `ahead` steps are loaded in advance. A global batch is G consecutive positions of the sample
    order; each data-parallel rank reads a contiguous part of it, the same on all its cp and tp ranks. No two
    data-parallel ranks read the same sample of an epoch, and the order is the same on every mesh.
    """

    def __init__(
        self,
        order: "SampleOrder | GivenOrder",
        sequences: SequenceShape,
        shape: BatchShape,
        first_sample: int,
        device: torch.device,
        ahead: int,
    ) -> None:
        self._order, self._sequences, self._shape = order, sequences, shape
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next_sample = first_sample
        self._thread, self._ready = BackgroundThread("train-loader"), deque[Future[_Ready]]()
        for _ in range(ahead):
            self._read_ahead()

    def next(self) -> StepData:
        """Return this rank's data of the next step. Raises the error of reading it, in later calls too."""
        start = time.perf_counter()
        batches, data_hash, copied = self._ready[0].result()
        wait_s = time.perf_counter() - start
        self._ready.popleft()
        self._read_ahead()
        if copied is not None:
            await_copies(batches, copied)
        return StepData(batches, data_hash, wait_s)

    def close(self) -> None:
        """Stop the thread and wait for it."""
        for step in self._ready:
            step.cancel()
        self._thread.close()

    def _read_ahead(self) -> None:
        self._ready.append(self._thread.submit(partial(self._read_step, self._next_sample)))
        self._next_sample += self._shape.global_batch_size

    def _read_step(self, first_sample: int) -> _Ready:
        shape, stream = self._shape, self._stream
        if stream is not None:  # a new thread uses GPU 0 and would create a second context there
            torch.cuda.set_device(stream.device)
        size = shape.micro_batch_size
        first = first_sample + shape.data_rank * size * shape.accumulation
        batches = [
            self._order.read(first + i * size, size, self._sequences, stream is not None)
            for i in range(shape.accumulation)
        ]
        data_hash = sum(
            hash_tokens(row, first + i) for i, row in enumerate(row for b in batches for row in b.tokens)
        )
        data_hash = data_hash if shape.context_rank == 0 else 0
        batches = [shape.local_tokens(batch) for batch in batches]
        batches, copied = copy_on_stream(batches, stream) if stream else (batches, None)
        return batches, data_hash, copied


def hash_tokens(row: torch.Tensor, position: int) -> int:
    """Return a 32-bit hash of a sequence's tokens and its position in the sample order."""
    return zlib.crc32(row.numpy().data, position & 0xFFFFFFFF)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device, asynchronously on the current stream."""
    copies = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors().items()}
    return Batch(**copies)


def copy_on_stream(batches: list[Batch], stream: torch.cuda.Stream) -> tuple[list[Batch], torch.cuda.Event]:
    """Copy batches to a GPU on a separate stream, and return them with the event that ends the copies.

    The memory belongs to that stream: call `await_copies` before using the batches.
    """
    with torch.cuda.stream(stream):
        return [to_device(batch, stream.device) for batch in batches], stream.record_event()


def await_copies(batches: list[Batch], copied: torch.cuda.Event) -> None:
    """Make the current stream wait for the copies, and keep their memory until it has used them."""
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)
    for batch in batches:
        for tensor in batch.tensors().values():
            tensor.record_stream(stream)


@dataclass(frozen=True)
class TrainingData:
    """The training data of a run; the same on every rank except for the rank's part of each batch.

    Args:
        order: the sequence at each position
        batch: how a global batch is divided, and this rank's part
        group: the data-parallel ranks
        steps: `train.steps`
        asked: sequences of `train.epochs`, which count instead of steps; 0: steps count
        start: the position at which this process begins to train
    """

    corpus: Corpus
    sequences: SequenceShape
    order: "SampleOrder | GivenOrder"
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

    def load_from(self, position: TrainPosition, ahead: int) -> TrainLoader:
        """Return a loader of this rank's micro batches from `position` on, at most `ahead` steps ahead."""
        return TrainLoader(self.order, self.sequences, self.batch, position.samples, self.device, ahead)

    def advance(self, position: TrainPosition) -> TrainPosition:
        """Return the position one optimizer step later."""
        return TrainPosition(
            step=position.step + 1,
            samples=position.samples + self.batch.global_batch_size,
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
        return {**self.order.progress(position.samples), "data_hash": f"{data_hash.item():016x}"}


def describe_data(config: Config, data: TrainingData) -> list[str]:
    """Return lines about the data of a run, and about what it is too short for."""
    batch_size = data.batch.global_batch_size
    sequences = sum(data.order.sizes) or batch_size  # of a data.factory it is not known
    short = describe_short_run(config.optim, data.total_steps, sequences, batch_size)
    return [f"data: {data.corpus.description}", *short]


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
    order: SampleOrder | GivenOrder = SampleOrder(corpus.sources, sequences, config.run.seed)
    if config.data.factory:
        from meshwright.train.data import given  # late: few runs have one

        order = given.GivenOrder(config.data.factory, config.run.seed)
    data = TrainingData(
        corpus=corpus,
        sequences=sequences,
        order=order,
        batch=make_batch_shape(plan, mesh),
        group=data_parallel_group(mesh, group_timeout(config.run)),
        device=planned.device,
        steps=train.steps,
        asked=max(1, round(train.epochs * sum(counts))) if train.epochs else 0,
        start=TrainPosition(),
    )
    saved = start.manifest.position if start.manifest else TrainPosition()
    data = replace(data, start=saved if data.same_order(saved) else replace(saved, samples=0))
    order.check(data.start.samples, sequences)
    return data


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
