"""The process groups of a plan: their number, because each has its own sockets and threads, and on GPUs a
communicator's memory; their timeouts and back ends."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_fsdp
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

import meshwright.train.phases
from meshwright.parallel import fsdp
from meshwright.parallel.mesh import build_mesh, data_parallel_group
from meshwright.parallel.plan.schema import MeshPlan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.process_group import group_timeout
from meshwright.train.distributed.ranks import RankInfo
from tests.support.launch import EAGER, TINY, write_text
from tests.support.sharded import build_sharded
from tests.support.worlds import run_ranks


def count_groups(settings: list[tuple[int, str]]) -> list[int]:
    """Return the number of process groups made for a model of so many layers and this
    reshard_after_forward."""
    counts = []
    for layers, reshard in settings:
        before = len(dist.distributed_c10d._world.pg_map)
        keys = [f"--model.n_layers={layers}", f"--parallel.reshard_after_forward={reshard}"]
        build_sharded([*TINY, *EAGER, *keys])
        counts.append(len(dist.distributed_c10d._world.pg_map) - before)
    return counts


def test_groups_do_not_grow_with_the_units_that_are_resharded_to_smaller_ones() -> None:
    plain, few, more = run_ranks(4, count_groups, [(1, "true"), (1, "2"), (3, "2")])[0]
    assert more == few == plain + 2, (
        "expected one group of the ranks that share a unit, and one of those with the same shard"
    )


TIMEOUT = timedelta(seconds=4321)
WORLD, RANK = 16, 5


@contextmanager
def one_rank(world_size: int, backend: str) -> Iterator[None]:
    """Make this process one rank of a group whose other ranks do not exist: gloo connects at the first
    collective."""
    dist.destroy_process_group()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    store = dist.HashStore()  # type: ignore[attr-defined]
    rank = min(RANK, world_size - 1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


Groups = dict[str, tuple[set[str], timedelta, list[int]]]  # devices, timeout and ranks by description


def all_groups() -> Groups:
    """Return all process groups of this process but the default one; a list of two is an error."""
    groups: Groups = {}
    for group in list(dist.distributed_c10d._world.pg_map)[1:]:
        devices = {device.type for device in group._device_types}
        timeouts = {group._get_backend(device).options._timeout for device in group._device_types}
        assert group.group_desc not in groups
        groups[group.group_desc] = devices, timeouts.pop(), dist.get_process_group_ranks(group)
        assert not timeouts
    return groups


def gloo_for_cuda(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def groups_of_rank(degrees: tuple[int, int, int], device: str, on_host: bool, reshard: int) -> Groups:
    """Return the groups of a mesh with `degrees`, of its data-parallel ranks, and of FSDP2's for
    `reshard`."""
    backend = "gloo"
    if device == "cuda":
        dist.Backend.register_backend("stand_in", gloo_for_cuda, devices=["cuda"])
        backend = "cpu:gloo,cuda:stand_in"
    with one_rank(math.prod(degrees), backend):
        mesh = build_mesh(MeshPlan(*degrees), device, TIMEOUT, on_host)
        data_parallel_group(mesh, TIMEOUT)
        if reshard:
            info = HSDPMeshInfo(mesh["dp_replicate", "dp_shard"], shard_mesh_dim=1, replicate_mesh_dim=0)
            with fsdp._same_groups_for_all_units(TIMEOUT):
                for _ in range(2):  # two units
                    torch_fsdp._get_post_forward_mesh_info(reshard, info)
        return all_groups()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_groups_have_the_runs_timeout_and_one_backend(device: str) -> None:
    """HSDP 2 x 4 with tp 2 and reshard_after_forward=2; on GPUs without a gloo half."""
    (groups,) = run_ranks(1, groups_of_rank, (2, 4, 2), device, False, 2)
    assert {name: ranks for name, (_, _, ranks) in groups.items()} == {
        "mesh_dp_replicate": [5, 13],
        "mesh_dp_shard": [1, 3, 5, 7],
        "mesh_tp": [4, 5],
        "mesh_data_parallel": [1, 3, 5, 7, 9, 11, 13, 15],
        "mesh_resharded_copies": [1, 5, 9, 13],
        "mesh_resharded": [5, 7],
    }
    assert {timeout for _, timeout, _ in groups.values()} == {TIMEOUT}
    if device == "cuda":
        assert {name for name, (devices, _, _) in groups.items() if devices != {"cuda"}} == set()


def count_of_ints(degrees: tuple[int, int, int]) -> str:
    """The device of a global count of ints on a mesh of GPUs, whose groups reduce nothing else."""

    def create(common: Any, _options: Any) -> Any:
        return FakeProcessGroup._create_internal(common.group_rank, common.group_size)

    dist.Backend.register_backend("on_gpus", create, extended_api=True, devices=["cuda"])
    with one_rank(math.prod(degrees), "cpu:gloo,cuda:on_gpus"):
        sharded: Any = SimpleNamespace(mesh=(mesh := build_mesh(MeshPlan(*degrees), "cuda")))
        sharded.data_group = data_parallel_group(mesh)
        with FakeTensorMode():
            counted = ShardedModel.global_count(sharded, [torch.zeros(2, 8)], torch.numel)
    return counted.device.type


@pytest.mark.parametrize("degrees", [(1, 4, 1), (1, 2, 2)])
def test_a_count_that_is_an_int_is_summed_on_the_device(degrees: tuple[int, int, int]) -> None:
    assert run_ranks(1, count_of_ints, degrees) == ["cuda"]


def test_groups_that_reduce_gradients_in_host_memory_have_a_gloo_half() -> None:
    """As with cpu_offload, for `ShardedModel`, which makes the copies on tp ranks equal."""
    (groups,) = run_ranks(1, groups_of_rank, (1, 8, 2), "cuda", True, 0)
    assert groups.keys() == {"mesh_dp_replicate", "mesh_dp_shard", "mesh_tp"}
    assert {tuple(sorted(devices)) for devices, _, _ in groups.values()} == {("cpu", "cuda")}
    assert {timeout for _, timeout, _ in groups.values()} == {TIMEOUT}


@pytest.mark.parametrize(
    ("degrees", "created"),
    [
        ((1, 4096, 1), {"mesh_dp_replicate"}),  # of one rank, for both axes of degree 1
        ((4096, 1, 1), {"mesh_dp_shard"}),
        ((1, 512, 8), {"mesh_dp_replicate", "mesh_dp_shard", "mesh_tp"}),
        ((128, 8, 1), {"mesh_dp_replicate", "mesh_dp_shard", "mesh_tp"}),
        ((16, 8, 8), {"mesh_dp_replicate", "mesh_dp_shard", "mesh_tp", "mesh_data_parallel"}),
        ((1, 1, 8), {"mesh_dp_replicate"}),
        ((1, 1, 1), set()),
    ],
)
def test_a_rank_creates_the_groups_of_its_own_axes_only(
    degrees: tuple[int, int, int], created: set[str]
) -> None:
    (groups,) = run_ranks(1, groups_of_rank, degrees, "cpu", False, 0)
    assert groups.keys() == created


def timeouts_in_training(arguments: list[str]) -> dict[str, timedelta]:
    """Run train.main and return the timeout of every group at the last step."""
    seen: dict[str, timedelta] = {}
    reached = meshwright.train.phases.train_loop

    def look(*of_loop: Any) -> Any:
        position = reached(*of_loop)
        for number, group in enumerate(list(dist.distributed_c10d._world.pg_map)[1:]):
            backend = group._get_backend(torch.device("cpu"))
            seen[f"{number} {group.group_desc}"] = backend.options._timeout
        return position

    meshwright.train.phases.train_loop = look
    ranks = RankInfo(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), True)
    meshwright.train.phases.run(parse_config(arguments), ranks)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return seen


@pytest.mark.sampled(3, day=0)
def test_every_group_of_a_run_has_its_timeout(tmp_path: Path) -> None:
    arguments = [
        *TINY,
        *EAGER,
        *write_text(tmp_path),
        f"--run.dir={tmp_path / 'run'}",
        "--parallel.dp_replicate=2",
        "--parallel.tp=2",
        "--train.global_batch_size=-1",
        "--run.timeouts.evaluation_s=5000",
        "--train.steps=1",
        "--train.eval_every=1",
        "--metrics.tensorboard=false",
    ]
    expected = group_timeout(parse_config(arguments).run)
    assert expected > timedelta(seconds=5000)
    for seen in run_ranks(4, timeouts_in_training, arguments):
        assert len(seen) >= 5  # three axes, the agreed stop and the checkpoints
        assert set(seen.values()) == {expected}, seen
