"""Batches for evaluation: the same sequences every time, shared out over the ranks."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from train.data.loader import BatchShape, count_sequences, read_batch, to_device
from train.step import Batch


def held_out_batches(tokens: NDArray[np.uint16], shape: BatchShape, limit: int, device: torch.device) -> Iterator[Batch]:
    """This rank's share of the first `limit` held-out sequences, in batches of one shape, as many on every rank."""
    count = min(limit, count_sequences(tokens, shape.seq_len, "held-out"))
    per_round = shape.micro_batch_size * shape.data_parallel
    for first in range(0, count, per_round):
        rows = first + shape.data_rank * shape.micro_batch_size + np.arange(shape.micro_batch_size)
        batch = read_batch(tokens, np.where(rows < count, rows, -1), shape.seq_len)
        yield to_device(batch, device)
