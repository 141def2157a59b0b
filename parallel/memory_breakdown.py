"""Memory of one rank by kind, as predicted or simulated."""

import dataclasses
import functools
from collections.abc import Mapping

GIB = 2**30


def round_up(size_bytes: int) -> int:
    """Return the size rounded up to a power of two, as torch allocates pinned host memory
    (ATen/core/CachingHostAllocator.h); 0 stays 0."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


@dataclasses.dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one rank.

    Args:
        params: this rank's shard of the parameters
        grads: its shard of the gradients, and whole gradients that are summed over micro batches
        optimizer: its shard of the optimizer state
        unsharded: gathered parameters and the buffers of their all-gathers
        activations: all other tensors of forward and backward, saved or temporary
        logits: logits, their gradient and the loss's intermediate tensors
        buffers: full gradients during their reduction; the model's buffers; the rest
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
        state = self.params + self.grads + self.optimizer + self.unsharded
        return state + self.activations + self.logits + self.buffers

    def gib(self) -> dict[str, float]:
        return {kind: size / GIB for kind, size in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Memory of a step: `memory`, the maximum of each kind at any time; `at_peak`, each kind at the time of
    the largest total."""

    memory: MemoryBreakdown
    at_peak: MemoryBreakdown

    @property
    def peak_bytes(self) -> int:
        """The largest total of the step."""
        return self.at_peak.total


@dataclasses.dataclass(frozen=True)
class PredictedMemory(StepMemory):
    """Predicted memory of a step. `pools`: bytes that a GPU's allocator reserves for each CUDA stream."""

    pools: Mapping[str, int]

    @property
    def pool_bytes(self) -> int:
        """What the allocator reserves for all streams."""
        return sum(self.pools.values())
