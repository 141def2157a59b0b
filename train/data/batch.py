"""The batch of a step, and its way from pinned memory to a device; the host does not wait. Shapes: B
sequences of a micro batch, T tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro batch of one rank, on its device: int64 tokens[B, T] and, one position on, targets[B, T];
    where documents are kept apart also first[B, T], the place in its sequence where each token's document
    begins."""

    tokens: Tensor
    targets: Tensor
    first: Tensor | None = None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on its way to the device; what is enqueued on the current stream finds it there."""
    first = None if batch.first is None else batch.first.to(device, non_blocking=True)
    return Batch(
        batch.tokens.to(device, non_blocking=True), batch.targets.to(device, non_blocking=True), first
    )


def copy_beside(batches: list[Batch], stream: torch.cuda.Stream) -> tuple[list[Batch], torch.cuda.Event]:
    """Batches on their way to a GPU on a stream of their own, beside whatever it computes, and the event
    after which they are there. The memory belongs to that stream: `await_copies` before they are used."""
    with torch.cuda.stream(stream):
        return [to_device(batch, stream.device) for batch in batches], stream.record_event()


def await_copies(batches: list[Batch], copied: torch.cuda.Event) -> None:
    """Let what is enqueued from now on wait for the copies, and their memory be used for others only when it
    is done."""
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)
    for batch in batches:
        for tensor in (batch.tokens, batch.targets, batch.first):
            if tensor is not None:
                tensor.record_stream(stream)
