"""How long the parts of a step take, each alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class UnitTimes:
    """Seconds that the collectives of one FSDP unit take alone: its all-gather in the forward and in the
    backward (which can be over a smaller group), the copies out of the gathered buffer and into the reduced
    one, the reduce-scatter, and the all-reduce over dp_replicate. 0 where there is none."""

    gather_s: float
    regather_s: float
    copy_out_s: float
    copy_in_s: float
    scatter_s: float
    all_reduce_s: float


@dataclass(frozen=True)
class ModuleTimes:
    """Seconds of one module's forward and backward for one micro batch: computing (recomputation included),
    and the tensor-parallel collectives in between, which nothing hides."""

    forward_s: float
    forward_tp_s: float
    backward_s: float
    backward_tp_s: float

    def forward_only(self) -> "ModuleTimes":
        """The same where the backward ends before it."""
        return ModuleTimes(self.forward_s, self.forward_tp_s, 0.0, 0.0)


@dataclass(frozen=True)
class StepTimes:
    """Everything that takes time in a step, by name of unit and module, of one rank. `optimizer_s`: norm and
    update. `overlaps` and `slowdown`: as in Hardware. `host_s`: of `offload.copy_times`."""

    units: Mapping[str, UnitTimes]
    modules: Mapping[str, ModuleTimes]
    optimizer_s: float
    overlaps: bool
    slowdown: float
    host_s: Mapping[str, float] = field(default_factory=dict)

    def busy_s(self, micro_batches: int) -> float:
        """Seconds of a step that waits for no gather and no reduction, and for host memory as little as can
        be: what is sent is sent before the forward ends, and fetched before the backward does."""
        copying = sum(self.host_s.values())
        forward = sum(m.forward_s + m.forward_tp_s for m in self.modules.values())
        backward = sum(m.backward_s + m.backward_tp_s for m in self.modules.values())
        return micro_batches * (max(forward, copying) + max(backward, copying)) + self.optimizer_s
