"""Host memory for the copies that saves are written from: its size is known in advance, and all ranks agree
on whether it is enough."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.train.checkpoint.host_buffers import HostMemoryRequest, copy_bytes, describe_missing, round_up
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver, make_room
from meshwright.train.config import CheckpointConfig, OptimConfig
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import ConfigError
from meshwright.train.optim.optimizer import build_optimizer
from tests.support.checkpoint_saves import Trainer, save
from tests.support.worlds import run_ranks

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 0), (1, 1), (3, 4), (4096, 4096), (4097, 8192), (2**31 + 1, 2**32)]
)
def test_pinned_memory_comes_in_powers_of_two(size: int, taken: int) -> None:
    assert round_up(size) == taken


def test_copies_of_a_gpus_tensors_are_pinned_and_those_of_a_cpus_are_not() -> None:
    """The device meta stands for a GPU."""
    shapes = [(3,), (5, 7)]
    assert copy_bytes(torch.empty(shape, device="meta") for shape in shapes) == 16 + 256
    assert copy_bytes(torch.empty(shape) for shape in shapes) == 12 + 140


def requests(*ranks: tuple[int, float, float]) -> list[HostMemoryRequest]:
    return [HostMemoryRequest(machine, int(needed * GIB), int(left * GIB)) for machine, needed, left in ranks]


def test_what_is_missing_is_of_a_whole_machine() -> None:
    two = [(0, 4, 10), (0, 4, 9), (2, 4, 8), (2, 4, 8)]
    assert describe_missing(requests(*two)) == ""
    message = describe_missing(requests(*two[:3], (2, 4, 7.5)))
    facts = (
        "8.00 GiB of host memory",
        "machine of rank 2",
        "2 processes",
        "7.50 GiB are free",
        "0.50 GiB are missing",
    )
    assert all(fact in message for fact in facts), message
    assert "machine of rank 0" in describe_missing(requests((0, 4, 1), (1, 4, 3.5)))


def save_on_machines(folder: Path, left_kib: list[int]) -> tuple[bool, str, int]:
    """Save on ranks of two machines with this much free memory; return whether saves were asynchronous, their
    errors, and the bytes of this rank's copies."""
    trainer, rank = Trainer(), dist.get_rank()
    machine = rank // 2 * 2
    saver = CheckpointSaver(
        CheckpointConfig(),
        folder,
        trainer.model,
        trainer.optimizer,
        trainer.mesh,
        {},
        lambda: left_kib[machine // 2] * 1024,
        machine,
    )
    assert saver.make_room() == "", "on a CPU nothing is allocated in advance"
    assert not saver._copies
    for step in (1, 2):
        saver.save(TrainPosition(step, 8, 0, 32, dist.get_world_size(), "data"))
        saver.wait()
    errors = "".join(saved.error for saved in saver.poll())
    return saver._asynchronous, errors, sum(copy.nbytes for copy in saver._copies.values())


def test_all_ranks_decide_alike_by_what_the_machines_have_for_all_of_theirs(tmp_path: Path) -> None:
    plenty = run_ranks(4, save_on_machines, tmp_path / "plenty", [10_000, 10_000])
    needs_kib = sum(taken for _, _, taken in plenty[2:]) // 1024 + 1
    for left, enough in (([10_000, needs_kib], True), ([10_000, needs_kib - 2], False), ([0, 10_000], False)):
        results = run_ranks(4, save_on_machines, tmp_path / f"{left}", left)
        assert [(asynchronous, error, taken > 0) for asynchronous, error, taken in results] == [
            (enough, "", enough)
        ] * 4


def save_as_on_gpus(folder: Path, refused_on: int) -> tuple[str, list[str], int]:
    """Return the result of make_room, the errors of two saves, and the number of this rank's copies, where
    saves need copies as on GPUs. On rank `refused_on` the system refuses the first allocation."""
    rank, mesh = (
        dist.get_rank(),
        init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)),
    )
    model = nn.Linear(4, 3)  # three rows: the last of four ranks has none
    fully_shard(model, mesh=mesh)
    saver = CheckpointSaver(
        CheckpointConfig(), folder, model, build_optimizer(model, OptimConfig()), mesh, {}, lambda: 2**30
    )
    saver._on_cpu, empty = False, torch.empty

    def refuse(*size: Any, **options: Any) -> torch.Tensor:
        if rank == refused_on and "pin_memory" in options:
            raise RuntimeError("out of memory")
        return empty(*size, **options)

    with mock.patch.object(torch, "empty", refuse):
        shortage = saver.make_room()
        errors = [save(saver, 1).error]
    errors.append(save(saver, 2).error)
    return shortage, errors, len(saver._copies)


def test_a_rank_with_nothing_to_write_makes_room_with_the_others(tmp_path: Path) -> None:
    results = run_ranks(4, save_as_on_gpus, tmp_path, -1)
    assert [(shortage, errors) for shortage, errors, _ in results] == [("", ["", ""])] * 4
    assert results[3][2] == 1, "its random state"


def test_memory_that_one_rank_does_not_get_is_no_rank_that_died(tmp_path: Path) -> None:
    for shortage, errors, _ in run_ranks(4, save_as_on_gpus, tmp_path, 1):
        assert "host memory for copies of the training state" in shortage
        assert "(out of memory)" in shortage
        assert errors == [shortage, ""]


class FullMachine:
    def make_room(self) -> str:
        return "all is taken"


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_without_room_a_run_ends_before_its_first_step_or_says_so(
    on_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CheckpointConfig(every=500, on_error=on_error)  # type: ignore[arg-type]
    if on_error == "stop":
        with pytest.raises(
            ConfigError,
            match=r"checkpoint\.every=500, but all is taken\. .*more machines.*checkpoint\.on_error=warn",
        ):
            make_room(FullMachine(), config, Console(True).print)  # type: ignore[arg-type]
    else:
        make_room(FullMachine(), config, Console(True).print)  # type: ignore[arg-type]
        assert "warning: saves will fail unless memory becomes free: all is taken" in capsys.readouterr().out


def test_machines_have_numbers_of_their_own() -> None:
    assert [RankInfo(rank, 8, rank % 4, 4, True).machine for rank in range(8)] == [0] * 4 + [4] * 4
