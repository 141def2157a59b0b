"""What is checked of somebody else: a model, the function that shards it, and a training loop."""

import copy
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from meshwright.parallel.check.updates import unfused
from meshwright.parallel.check.values import moved, with_random_ids
from meshwright.parallel.errors import PlanError
from meshwright.parallel.model.forward import Example, example_or_tokens
from meshwright.parallel.model.parts import repeated_rows, rows_of, some_rows
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.schema import AXES, MeshPlan

MICRO_BATCHES = 2
LR = 1e-2  # of the step between two comparisons: large enough that what it changes is seen
MOST_PARAMETERS = 50_000_000


def where(function: Callable[..., Any]) -> str:
    """Return the name of a function or class, and where it is, for a message."""
    try:
        return (
            f"{function.__name__} ({inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]})"
        )
    except (AttributeError, TypeError, OSError):  # as of a partial
        return repr(function)


@dataclass(frozen=True)
class Subject:
    """Whose sharding is checked.

    Args:
        build: returns the model, with values, or the model and an example of its arguments
        shard: shards a model over a mesh, and returns it; None: it did so in place
        mesh: its degrees
        loop: of a model and a mesh, None on one process: has `step(batches)`, which returns the loss or
            None, and if `save(folder)` and `load(folder)`, these are checked too; None: the check's own
        folder: for what the loop saves
        device: "cpu" or "cuda"
        equal_rows: whether each micro batch of each rank has as many rows
        optimizer: of a model and a mesh, None on one process; None: SGD
    """

    build: Callable[[], Any]
    shard: Callable[[nn.Module, DeviceMesh], nn.Module | None]
    mesh: MeshPlan
    loop: Callable[[nn.Module, DeviceMesh | None], Any] | None = None
    folder: Path = Path()
    device: str = "cpu"
    equal_rows: bool = False
    optimizer: Callable[[nn.Module, DeviceMesh | None], torch.optim.Optimizer] | None = None

    def start(self) -> tuple[nn.Module, Example]:
        """Return the model with moved values, and enough rows of the example."""
        torch.manual_seed(0)
        model, example = self.built()
        if meta := [name for name, tensor in model.state_dict().items() if tensor.is_meta]:
            raise PlanError(f"check: {meta[0]} is on the meta device: give a model with values")
        if (count := sum(p.numel() for p in model.parameters())) > MOST_PARAMETERS:
            raise PlanError(
                f"check: {count:,} parameters are too many, as each process keeps a dozen copies: give a "
                f"model of the same classes of at most {MOST_PARAMETERS:,}"
            )
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), moved(model).values(), strict=True):
                parameter.data = value
        rows = sum(map(sum, self.rows()))
        probe = copy.deepcopy(model)  # a forward may write buffers
        example = with_random_ids(probe, repeated_rows(example, rows), anew=rows_of(example) < rows)
        moved_example: Example = tree_map_only(Tensor, lambda t: t.to(self.device), example)
        return model.to(self.device).train(), moved_example

    def built(self) -> tuple[nn.Module, Example]:
        """Return the model, and its example: of tokens, if it gives none."""
        result = self.build()
        model, example = (*result, None)[:2] if isinstance(result, tuple) else (result, None)
        return model, example_or_tokens(model, example)

    def device_mesh(self) -> DeviceMesh:
        """Return the mesh, with the axes of more than one rank. Raises PlanError if all have one."""
        if self.mesh.world_size == 1:
            raise PlanError("check: one rank shards nothing: give an axis 2 ranks, as dp_shard=2")
        sizes = {axis: size for axis in AXES if (size := getattr(self.mesh, axis)) > 1}
        return init_device_mesh(self.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def sharded(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        found = self.shard(model, mesh)
        if not isinstance(found, nn.Module | None):
            raise PlanError(
                f"check: {where(self.shard)} returned {type(found).__name__}, not a model or None"
            )
        model = model if found is None else found
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise PlanError("check: FSDP1 has no whole parameters to compare: use torch's fully_shard")
        return model.train()

    def new_loop(self, model: nn.Module, mesh: DeviceMesh | None) -> Any:
        assert self.loop is not None
        loop = self.loop(model, mesh)
        if not callable(getattr(loop, "step", None)):
            hint = nearest("step", dir(loop))
            raise PlanError(f"check: what {where(self.loop)} makes has no step(batches): add it.{hint}")
        return loop

    def new_optimizer(self, model: nn.Module, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return unfused(self.optimizer(model, mesh))
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, foreach=False)

    def rows(self) -> list[list[int]]:
        """Return the number of rows of each micro batch of each data-parallel rank."""
        return [
            [2 if self.equal_rows else 1 + (rank + number) % 3 for number in range(MICRO_BATCHES)]
            for rank in range(self.mesh.data_parallel)
        ]

    def rows_of_step(self, example: Example, step: int) -> Example:
        """Return the rows of all ranks in a step, of which each has other ones."""
        rolled = tree_map_only(Tensor, lambda t: t.roll(step, 0) if t.dim() else t, example)
        return some_rows(rolled, 0, sum(map(sum, self.rows())))

    def batches(self, example: Example, step: int) -> list[list[Example]]:
        """Return the micro batches of each data-parallel rank in a step, together its rows."""
        example, found, start = self.rows_of_step(example, step), [], 0
        for counts in self.rows():
            ends = [start + end for end in itertools.accumulate(counts, initial=0)]
            found.append([some_rows(example, *pair) for pair in itertools.pairwise(ends)])
            start = ends[-1]
        return found
