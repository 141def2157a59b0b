"""For tests of one's own sharding: `assert_same`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshwright.parallel.check.foreign import check_sharding
from meshwright.parallel.check.kinds import TOLERANCE
from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.check.subject import Subject
from meshwright.parallel.plan.schema import MeshPlan

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


def assert_same(
    build: Callable[[], Any],
    shard: "Callable[[nn.Module, DeviceMesh], nn.Module | None]",
    *,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    loop: Callable[..., Any] | None = None,
    device: str = "cpu",
    equal_rows: bool = False,
    tolerance: float = TOLERANCE,
    optimizer: "Callable[[nn.Module, DeviceMesh | None], Optimizer] | None" = None,
) -> CheckReport:
    """Assert that a model trains the same as `shard` shards it as on one process, and return the report.

    Args:
        build: returns the model, with values, or the model and an example of its arguments; the first
            dimension of its tensors is the batch
        shard: of the model and a mesh, whose dimensions are the axes of more than one rank, by their names;
            returns the model, or None if it has sharded it in place
        dp_replicate, dp_shard: number of ranks that get different rows; if all four are 1, dp_shard is 2
        cp, tp: number of ranks that get the same rows
        loop: of the sharded model and the mesh, None on one process: its `step(batches)` takes an optimizer
            step and returns the loss or None; what it can `save(folder)` and `load(folder)` is checked too
        device: "cpu" (gloo) or "cuda" (NCCL)
        equal_rows: give all ranks equally many rows, for code that needs it
        tolerance: of a relative difference
        optimizer: of the sharded model and the mesh, None on one process; its steps are compared too

    All functions and classes must be at the top of a module, because other processes import them. Raises
    AssertionError with the report, and PlanError if a process fails or no step changes a parameter.
    """
    if dp_replicate * dp_shard * cp * tp == 1:
        dp_shard = 2
    mesh = MeshPlan(dp_replicate, dp_shard, tp, cp)
    subject = Subject(build, shard, mesh, loop, device=device, equal_rows=equal_rows, optimizer=optimizer)
    report = check_sharding(subject, tolerance)
    assert report.same, f"the sharded model does not train as on one process\n{report}"
    return report
