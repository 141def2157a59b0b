"""Loads batches ahead of the step in a background thread.

Shapes: G sequences of the global batch, B of a micro batch, T tokens.
"""

import queue
import threading
import time
import zlib
from dataclasses import dataclass

import torch

from meshwright.parallel.sharded_model import token_positions
from meshwright.train.data.batch import Batch, at_positions, await_copies, copy_on_stream
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import SequenceShape, read_batch

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

    def own_tokens(self, batch: Batch) -> Batch:
        """Return this rank's tokens of a batch of whole sequences."""
        if self.context_parallel == 1:
            return batch
        seq_len = batch.tokens.shape[1]
        return at_positions(
            batch, token_positions(self.exchange, self.context_parallel, self.context_rank, seq_len)
        )


@dataclass(frozen=True)
class StepData:
    """The data of one rank for one optimizer step.

    Args:
        micro_batches: on the device
        data_hash: hash of this rank's tokens and their positions in the sample order; its sum over the
            data-parallel ranks is the same on every mesh; 0 on all but the first rank of a cp group
        wait_s: seconds that the step waited for the batches
    """

    micro_batches: list[Batch]
    data_hash: int
    wait_s: float


class TrainLoader:
    """Endless micro batches of this rank for every optimizer step from position `first_sample` on.

    At most `ahead` steps are loaded in advance. A global batch is G consecutive positions of the sample
    order; each data-parallel rank reads a contiguous part of it, the same on all its cp and tp ranks. No two
    data-parallel ranks read the same sample of an epoch, and the order is the same on every mesh.
    """

    def __init__(
        self,
        order: SampleOrder,
        sequences: SequenceShape,
        shape: BatchShape,
        first_sample: int,
        device: torch.device,
        ahead: int,
    ) -> None:
        self._order, self._sequences, self._shape = order, sequences, shape
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free_slots, self._closed = threading.Semaphore(ahead), threading.Event()
        self._ready: queue.SimpleQueue[_Ready | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._fill, args=(first_sample,), name="train-loader", daemon=True
        )
        self._thread.start()

    def next(self) -> StepData:
        """Return this rank's data of the next step. Raises the exception of the loading thread, if any."""
        start = time.perf_counter()
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            self._ready.put(ready)  # the next call raises it again
            raise ready
        wait_s = time.perf_counter() - start
        self._free_slots.release()
        batches, data_hash, copied = ready
        if copied is not None:
            await_copies(batches, copied)
        return StepData(batches, data_hash, wait_s)

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._closed.set()
        self._free_slots.release()
        self._thread.join()

    def _fill(self, first_sample: int) -> None:
        try:
            if self._stream is not None:  # a new thread uses GPU 0 and would create a second context there
                torch.cuda.set_device(self._stream.device)
            while self._free_slots.acquire() and not self._closed.is_set():
                self._ready.put(self._read_step(first_sample))
                first_sample += self._shape.global_batch_size
        except BaseException as error:  # next() raises it in the training loop
            self._ready.put(error)

    def _read_step(self, first_sample: int) -> _Ready:
        shape, stream = self._shape, self._stream
        per_rank = shape.micro_batch_size * shape.accumulation
        first = first_sample + shape.data_rank * per_rank
        micro_batches = self._order.rows(first, per_rank).reshape(
            shape.accumulation, shape.micro_batch_size, 2
        )
        batches = [
            read_batch(self._order.splits, rows, self._sequences, stream is not None)
            for rows in micro_batches
        ]
        data_hash = sum(
            hash_tokens(row, first + i) for i, row in enumerate(row for b in batches for row in b.tokens)
        )
        data_hash = data_hash if shape.context_rank == 0 else 0
        batches = [shape.own_tokens(batch) for batch in batches]
        batches, copied = copy_on_stream(batches, stream) if stream else (batches, None)
        return batches, data_hash, copied


def hash_tokens(row: torch.Tensor, position: int) -> int:
    """Return a 32-bit hash of a sequence's tokens and its position in the sample order."""
    return zlib.crc32(row.numpy().data, position & 0xFFFFFFFF)
