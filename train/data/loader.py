"""Batches, prepared ahead of the step by a thread.

Shapes: G sequences of the global batch, B of a micro batch, T tokens.
"""

import queue
import threading
import time
import zlib
from dataclasses import dataclass

import torch

from meshwright.train.data.batch import Batch, await_copies, copy_beside
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import SequenceShape, read_batch

# a step's batches, their hash, and when they are on the GPU
_Ready = tuple[list[Batch], int, torch.cuda.Event | None]


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is cut: `data_rank` of `data_parallel` takes `accumulation` micro batches of [B,
    T]."""

    micro_batch_size: int
    accumulation: int
    data_rank: int
    data_parallel: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation * self.data_parallel


@dataclass(frozen=True)
class StepData:
    """What one rank gets for an optimizer step.

    Args:
        micro_batches: on the device
        data_hash: of this rank's tokens and their positions in the order; summed over the ranks the same on
            every mesh
        wait_s: how long the step had to wait for them, in seconds
    """

    micro_batches: list[Batch]
    data_hash: int
    wait_s: float


class TrainLoader:
    """Micro batches of this rank for every optimizer step from `first_sample` on, endless; at most `ahead`
    are there beforehand.

    A global batch is G consecutive positions of the order, of which each rank takes a contiguous part, so no
    two ranks ever see the same sample, and the order is the same on every mesh.
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
        self._room, self._closed = threading.Semaphore(ahead), threading.Event()
        self._ready: queue.SimpleQueue[_Ready | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._fill, args=(first_sample,), name="train-loader", daemon=True
        )
        self._thread.start()

    def next(self) -> StepData:
        """This rank's part of the next step."""
        start = time.perf_counter()
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            self._ready.put(ready)  # whoever asks again hears the same
            raise ready
        wait_s = time.perf_counter() - start
        self._room.release()
        batches, data_hash, copied = ready
        if copied is not None:
            await_copies(batches, copied)
        return StepData(batches, data_hash, wait_s)

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._closed.set()
        self._room.release()
        self._thread.join()

    def _fill(self, first_sample: int) -> None:
        try:
            if self._stream is not None:  # a thread begins on GPU 0, and would make a second context there
                torch.cuda.set_device(self._stream.device)
            while self._room.acquire() and not self._closed.is_set():
                self._ready.put(self._read_step(first_sample))
                first_sample += self._shape.global_batch_size
        except BaseException as error:  # handed to the training loop, which raises it
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
        batches, copied = copy_beside(batches, stream) if stream else (batches, None)
        return batches, data_hash, copied


def hash_tokens(row: torch.Tensor, position: int) -> int:
    """32 bits that change with the tokens of a sequence and with its position in the order."""
    return zlib.crc32(row.numpy().data, position & 0xFFFFFFFF)
