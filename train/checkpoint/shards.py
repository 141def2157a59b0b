"""Which part of which tensor a rank writes: all ranks together write each element once, and nobody has to ask
another."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.parallel.fsdp import local_part


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor: its values, and where in the whole tensor they begin."""

    values: Tensor
    offsets: tuple[int, ...]


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that training changes, by plain name: `model.FQN` and `optim.FQN.MOMENT`; a tied weight
    once."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        tensors |= {f"optim.{names[parameter]}.{key}": value for key, value in state.items()}
    return tensors


def random_state() -> dict[str, Tensor]:
    """The state of this rank's random generators, each under a name of its own."""
    rank = dist.get_rank()
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def own_shards(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, Shard]:
    """What this rank writes of tensors that lie on `mesh`, the run's, or on some of its axes. Those that
    several ranks hold alike take turns among them, one tensor after the other."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    assert mesh.mesh_dim_names is not None
    shards = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        copies, mine = 1, 0
        for axis, size, coordinate in zip(mesh.mesh_dim_names, mesh.shape, coordinates, strict=True):
            if axis not in _sharded_axes(tensor):
                copies, mine = copies * size, mine * size + coordinate
        if number % copies != mine:
            continue
        shard = _own_shard(tensor)
        if shard.values.numel():
            shards[name] = shard
    return shards


def _sharded_axes(tensor: Tensor) -> set[str]:
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    return {
        axis for axis, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate()
    }


def _own_shard(tensor: Tensor) -> Shard:
    if not isinstance(tensor, DTensor):
        return Shard(tensor, (0,) * tensor.dim())
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = local_part(tensor)
    assert local.shape == torch.Size(shape), (local.shape, shape)
    return Shard(local, tuple(offsets))


# Of a tensor in the header of a rank's file: its name twice, dtype, shape, offsets. Of an 8B model 204 on
# average, of a 405B 210.
_HEADER_BYTES = 256


def needed_bytes(tensors: Mapping[str, Tensor], random: Mapping[str, Tensor], world_size: int) -> int:
    """Bytes of the files of all ranks: the tensors once; of each rank the random state, and the header of its
    file, which names nearly all tensors: with thousands of ranks that is gigabytes."""
    return count_bytes(tensors) + world_size * (count_bytes(random) + len(tensors) * _HEADER_BYTES)


def count_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the whole tensors, over all ranks."""
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
