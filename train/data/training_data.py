"""The training data of a run: corpus, sequences, sample order, batch shape and number of steps; and a thread
that loads batches ahead of the step.

Shapes: G sequences of the global batch, B of a micro batch, T tokens.
"""

import math
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.mesh import context_rank, data_parallel_group, data_parallel_rank, gather_from_all
from meshwright.parallel.plan.schema import Plan
from meshwright.train.background import BackgroundThread
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.resume import Start
from meshwright.train.config import Config
from meshwright.train.data.corpus import Corpus, check_evaluation, check_sequences, load_on_all_ranks
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import (
    Batch,
    BatchShape,
    Mark,
    SequenceShape,
    StepData,
    make_sequence_shape,
)
from meshwright.train.distributed.process_group import group_timeout
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.model.trained_model import model_of
from meshwright.train.optim.optimizer import describe_short_run
from meshwright.train.planning.run_plan import RunPlan

if TYPE_CHECKING:
    from meshwright.train.data.given import GivenOrder
    from meshwright.train.data.stream.order import StreamOrder

# a step's batches, their hash, where reading goes on, and the event after which they are on the GPU
_Ready = tuple[list[Batch], int, Mark, torch.cuda.Event | None]
Order: TypeAlias = "SampleOrder | GivenOrder | StreamOrder"


class TrainLoader:
    """Endless micro batches of this rank for every optimizer step from position `start` on.

    At most `ahead` steps are loaded in advance. A global batch is G consecutive positions of the sample
    order; each data-parallel rank reads its part of it, the same on all its cp and tp ranks. No two
    data-parallel ranks read the same sample of an epoch, and the order is the same on every mesh.
    """

    def __init__(
        self,
        order: "Order",
        sequences: SequenceShape,
        shape: BatchShape,
        start: TrainPosition,
        device: torch.device,
        ahead: int,
    ) -> None:
        self._reader, self._shape, self._strided = order.reader(start, shape, sequences), shape, order.strided
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next_sample, self._asked_s = start.samples, 0.0  # when is_ready was called first for a step
        self._thread, self._ready = BackgroundThread("train-loader"), deque[Future[_Ready]]()
        for _ in range(ahead):
            self._read_ahead()

    def is_ready(self, limit_s: float) -> bool:
        """Wait at most `limit_s` seconds for the data of the next step, and return whether `next` need not
        wait. The step's wait begins with the first call."""
        self._asked_s = self._asked_s or time.perf_counter()
        return bool(wait([self._ready[0]], limit_s).done)

    def next(self) -> StepData:
        """Return this rank's data of the next step. Raises the error of reading it, in later calls too."""
        start = self._asked_s or time.perf_counter()
        batches, data_hash, mark, copied = self._ready[0].result()
        wait_s, self._asked_s = time.perf_counter() - start, 0.0
        self._ready.popleft()
        self._read_ahead()
        if copied is not None:
            await_copies(batches, copied)
        return StepData(batches, data_hash, wait_s, mark)

    def close(self) -> None:
        """Stop the thread and wait for it."""
        for step in self._ready:
            step.cancel()
        self._reader.close()
        self._thread.close()

    def _read_ahead(self) -> None:
        self._ready.append(self._thread.submit(partial(self._read_step, self._next_sample)))
        self._next_sample += self._shape.global_batch_size

    def _read_step(self, first_sample: int) -> _Ready:
        shape, stream = self._shape, self._stream
        if stream is not None:  # a new thread uses GPU 0 and would create a second context there
            torch.cuda.set_device(stream.device)
        batches, mark = self._reader.read(first_sample, stream is not None), self._reader.mark()
        positions = shape.positions(first_sample, self._strided).tolist()
        rows = [row for batch in batches for row in batch.tokens]
        data_hash = sum(map(hash_tokens, rows, positions))
        if shape.context_rank:  # the first rank of a cp group counts
            data_hash, mark = 0, replace(mark, counts=(0,) * len(mark.counts))
        batches = [shape.local_tokens(batch) for batch in batches]
        batches, copied = copy_on_stream(batches, stream) if stream else (batches, None)
        return batches, data_hash, mark, copied


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
    order: Order
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
        return TrainLoader(self.order, self.sequences, self.batch, position, self.device, ahead)

    def advance(self, position: TrainPosition, step: StepData) -> TrainPosition:
        """Return the position one optimizer step later. Of streamed data it has the places of the lanes that
        this rank saves (`complete`)."""
        return TrainPosition(
            step=position.step + 1,
            samples=position.samples + self.batch.global_batch_size,
            seed=self.order.seed,
            seq_len=self.sequences.seq_len,
            world_size=dist.get_world_size(),
            data=self.corpus.fingerprint,
            lanes=self.order.lanes,
            places=step.mark.places,
        )

    def complete(self, position: TrainPosition) -> TrainPosition:
        """Return a position with the places of all lanes; every rank calls it."""
        if not self.order.lanes:
            return position
        of_ranks = gather_from_all(dict(position.places))
        return replace(
            position, places={lane: place for places in of_ranks for lane, place in places.items()}
        )

    def same_order(self, position: TrainPosition) -> bool:
        """Whether the sample order of a saved position is that of this run."""
        current = self.corpus.fingerprint, self.order.seed, self.sequences.seq_len
        return (position.data, position.seed, position.seq_len) == current

    def describe_step(self, position: TrainPosition, step: StepData) -> dict[str, Any]:
        """Return the data columns of a metrics row: progress, and the hash of the step's sequences and their
        positions in the sample order over all ranks, the same on every mesh. Every rank must call it."""
        sums = torch.tensor([step.data_hash, *step.mark.counts], device=self.device)
        dist.all_reduce(sums, group=self.group)
        data_hash, *counts = sums.tolist()
        return {**self.order.progress(position.samples, counts), "data_hash": f"{data_hash:016x}"}


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
    saved = start.manifest.position if start.manifest else TrainPosition()
    order: Order = SampleOrder(corpus.sources, sequences, config.run.seed)
    if config.data.factory:
        from meshwright.train.data import given  # late: few runs have one

        order = given.GivenOrder(config.data.factory, config.run.seed)
    elif config.data.streamed:
        from meshwright.train.data.stream.order import load_stream  # late, as above

        degree = plan.mesh.data_parallel
        order, corpus = load_stream(config, corpus, degree, ranks, saved, print_)
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
    data = replace(data, start=saved if data.same_order(saved) else replace(saved, samples=0, places={}))
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
