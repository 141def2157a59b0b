"""Micro batches and their asynchronous copy from pinned memory to a device. Shapes: B sequences of a micro
batch, T tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro batch of one rank: int64 tokens[B, T] and targets[B, T], the tokens one position later.

    With a document mask also first[B, T]: the position in the sequence where each token's document begins.
    """

    tokens: Tensor
    targets: Tensor
    first: Tensor | None = None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device, asynchronously on the current stream."""
    first = None if batch.first is None else batch.first.to(device, non_blocking=True)
    return Batch(
        batch.tokens.to(device, non_blocking=True), batch.targets.to(device, non_blocking=True), first
    )


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
        for tensor in (batch.tokens, batch.targets, batch.first):
            if tensor is not None:
                tensor.record_stream(stream)
