"""Micro batches and their asynchronous copy from pinned memory to a device. Shapes: B sequences of a micro
batch, T tokens of a sequence, t those of a rank (T without context parallelism)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro batch of one rank: int64 tokens[B, t] and targets[B, t], the tokens one position later.

    With a document mask also first[B, T]: the position in the sequence where each token's document begins.
    With context parallelism also positions[t]: those of the tokens in their sequences.
    """

    tokens: Tensor
    targets: Tensor
    first: Tensor | None = None
    positions: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def at_positions(batch: Batch, positions: Tensor) -> Batch:
    """Return the tokens and targets at positions[t] of whole sequences, as they are needed by a rank that
    holds only these."""
    return Batch(batch.tokens[:, positions], batch.targets[:, positions], batch.first, positions)


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
