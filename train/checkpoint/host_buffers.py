"""Host memory for the copies that saves are written from: whether every machine has enough for its ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from meshwright.parallel.memory_breakdown import GIB, round_up


@dataclass(frozen=True)
class HostMemoryRequest:
    """The host memory that one rank requests.

    Args:
        machine: a number shared by the ranks of a machine
        needed_bytes: bytes of this rank's copies
        left_bytes: bytes free on the machine, before any of its ranks allocated its copies
    """

    machine: int
    needed_bytes: int
    left_bytes: int


def copy_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the host memory that copies of the tensors take. Copies of GPU tensors are pinned."""
    return sum(
        tensor.nbytes if tensor.device.type == "cpu" else round_up(tensor.nbytes) for tensor in tensors
    )


def describe_missing(requests: Sequence[HostMemoryRequest]) -> str:
    """Describe the machine with the largest shortage of host memory; "" if every machine has enough."""
    machines: dict[int, list[HostMemoryRequest]] = {}
    for request in requests:
        machines.setdefault(request.machine, []).append(request)
    needs = {machine: sum(request.needed_bytes for request in ranks) for machine, ranks in machines.items()}
    left = {machine: min(request.left_bytes for request in ranks) for machine, ranks in machines.items()}
    worst = max(needs, key=lambda machine: needs[machine] - left[machine])
    if (missing := needs[worst] - left[worst]) <= 0:
        return ""
    return (
        f"copies of the training state need {needs[worst] / GIB:.2f} GiB of host memory on the machine of "
        f"rank {worst}, for {len(machines[worst])} processes; {left[worst] / GIB:.2f} GiB are free there, "
        f"{missing / GIB:.2f} GiB are missing: use more machines, fewer processes on each, or more memory "
        "(in a container: a higher limit)"
    )
