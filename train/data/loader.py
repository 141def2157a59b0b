"""Batches, prepared ahead of the step by a thread.

Shapes: G sequences of the global batch, B of a micro batch, T tokens.
"""

import contextlib
import queue
import threading
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from models.loss import IGNORE_INDEX
from train.data.config import DataError
from train.data.order import sample_indices
from train.step import Batch


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is cut: `data_rank` of `data_parallel` takes `accumulation` micro batches of [B, T]."""

    micro_batch_size: int
    accumulation: int
    seq_len: int
    data_rank: int
    data_parallel: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation * self.data_parallel


def count_sequences(tokens: NDArray[np.uint16], seq_len: int, what: str) -> int:
    """How many sequences of seq_len inputs, and one more target, the packed tokens hold; DataError if none."""
    count = (len(tokens) - 1) // seq_len
    if count < 1:
        raise DataError(f"data.source has {len(tokens)} {what} tokens, fewer than one sequence of "
                        f"train.seq_len={seq_len} + 1: use more text or a shorter sequence")  # fmt: skip
    return count


class TrainLoader:
    """Micro batches of this rank for every optimizer step from `first_sample` on, endless.

    Position p of the order is the same sample on every mesh; a global batch is G consecutive positions, of which
    each rank takes a contiguous part, so no two ranks ever see the same sample.
    """

    def __init__(
        self, tokens: NDArray[np.uint16], shape: BatchShape, seed: int, first_sample: int, device: torch.device, ahead: int
    ) -> None:
        self._tokens, self._shape, self._seed, self._device = tokens, shape, seed, device
        self._n = count_sequences(tokens, shape.seq_len, "training")
        self._ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(first_sample,), name="train-loader", daemon=True)
        self._thread.start()

    def next(self) -> tuple[list[Batch], float]:
        """This rank's micro batches of the next step, and how long the step had to wait for them, in seconds."""
        start = time.perf_counter()
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._put(item)  # whoever asks again hears the same
            raise item
        wait_s = time.perf_counter() - start
        return [to_device(batch, self._device) for batch in item], wait_s

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._closed.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join()

    def _fill(self, first_sample: int) -> None:
        try:
            while not self._closed.is_set():
                self._put(self._read_step(first_sample))
                first_sample += self._shape.global_batch_size
        except BaseException as error:  # handed to the training loop, which raises it
            self._put(error)

    def _put(self, item: list[Batch] | BaseException) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return

    def _read_step(self, first_sample: int) -> list[Batch]:
        shape = self._shape
        per_rank = shape.micro_batch_size * shape.accumulation
        mine = sample_indices(first_sample + shape.data_rank * per_rank, per_rank, self._n, self._seed)
        micro_batches = mine.reshape(shape.accumulation, shape.micro_batch_size)
        return [self._pinned(read_batch(self._tokens, rows, shape.seq_len)) for rows in micro_batches]

    def _pinned(self, batch: Batch) -> Batch:
        if self._device.type != "cuda":
            return batch
        return Batch(batch.tokens.pin_memory(), batch.targets.pin_memory())


def read_batch(tokens: NDArray[np.uint16], rows: NDArray[np.int64], seq_len: int) -> Batch:
    """Sequences `rows` of the packed tokens, on the host; a row of -1 is padding, which counts for nothing."""
    window = np.arange(seq_len + 1)
    ids = torch.from_numpy(tokens[np.maximum(rows, 0)[:, None] * seq_len + window].astype(np.int64))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].clone()  # a copy: padding is written into the targets alone
    targets[torch.from_numpy(rows < 0)] = IGNORE_INDEX
    return Batch(inputs, targets)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on its way to the device; the host does not wait."""
    return Batch(batch.tokens.to(device, non_blocking=True), batch.targets.to(device, non_blocking=True))
