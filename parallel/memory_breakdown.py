"""Memory of one rank by kind: what a prediction says and a simulation counts."""

import dataclasses
import functools

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one rank.

    Args:
        params: this rank's share of the parameters
        grads: of their gradients
        optimizer: of the optimizer's state
        unsharded: parameters that are gathered, with the buffers they are gathered through
        activations: everything else that forward and backward make, kept or passing
        logits: logits, and what the loss makes of them and their gradient
        buffers: whole gradients on their way through the reduction; the model's buffers; the rest
    """

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    unsharded: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0

    @functools.cached_property
    def total(self) -> int:
        return (
            self.params
            + self.grads
            + self.optimizer
            + self.unsharded
            + self.activations
            + self.logits
            + self.buffers
        )

    def gib(self) -> dict[str, float]:
        """In GiB, by kind."""
        return {kind: size / GIB for kind, size in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """A step's memory: the most of each kind at any time, and each kind at the moment when all together are
    most."""

    memory: MemoryBreakdown
    at_peak: MemoryBreakdown

    @property
    def peak_bytes(self) -> int:
        return self.at_peak.total
