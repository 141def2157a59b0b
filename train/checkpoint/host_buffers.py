"""Host memory for the copies that a save is written from: whether all machines have enough for their
ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from meshwright.parallel.memory_breakdown import GIB


@dataclass(frozen=True)
class RoomAsked:
    """What one rank asks for. `machine`: a number that the ranks of a machine share; `left_bytes`: what that
    machine had left, for all its ranks together, before any of them took its part."""

    machine: int
    needed_bytes: int
    left_bytes: int


def copy_bytes(tensors: Iterable[Tensor]) -> int:
    """Host memory that copies take: those of a GPU's tensors are pinned, and torch's allocator of pinned
    memory rounds each up to a power of two (ATen/core/CachingHostAllocator.h)."""
    return sum(
        tensor.nbytes if tensor.device.type == "cpu" else round_up(tensor.nbytes) for tensor in tensors
    )


def round_up(size_bytes: int) -> int:
    """To a power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def describe_missing(asked: Sequence[RoomAsked]) -> str:
    """What the machine with the greatest want has and needs, in words; "" where every machine has enough."""
    machines: dict[int, list[RoomAsked]] = {}
    for one in asked:
        machines.setdefault(one.machine, []).append(one)
    needs = {machine: sum(one.needed_bytes for one in ranks) for machine, ranks in machines.items()}
    left = {machine: min(one.left_bytes for one in ranks) for machine, ranks in machines.items()}
    worst = max(needs, key=lambda machine: needs[machine] - left[machine])
    if (missing := needs[worst] - left[worst]) <= 0:
        return ""
    return (
        f"copies of the training state need {needs[worst] / GIB:.2f} GiB of host memory on the machine of "
        f"rank {worst}, for {len(machines[worst])} processes; {left[worst] / GIB:.2f} GiB are left there, "
        f"{missing / GIB:.2f} GiB are missing"
    )
