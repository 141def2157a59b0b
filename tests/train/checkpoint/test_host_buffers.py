"""Host memory for the copies that saves are written from: all ranks agree on whether it is enough."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import CheckpointConfig, OptimConfig
from meshwright.train.optim.optimizer import build_optimizer
from tests.support.checkpoint_saves import Trainer, save
from tests.support.worlds import run_ranks


def save_on_machines(folder: Path, free: tuple[int, int]) -> tuple[bool, int, str]:
    """Save on two ranks of each of two machines, where each rank has this much free memory; return whether
    saves were asynchronous, the bytes of this rank's copies, and errors."""
    trainer = Trainer()
    saver = CheckpointSaver(
        CheckpointConfig(every=1),
        folder,
        trainer.model,
        trainer.optimizer,
        trainer.mesh,
        {},
        lambda: free[dist.get_rank() // 2],
    )
    saver.make_room(0, print)
    assert not saver._copies, "on a CPU nothing is allocated in advance"
    errors = "".join(save(saver, step).error for step in (1, 2))
    return saver._asynchronous, sum(copy.nbytes for copy in saver._copies.values()), errors


def save_with_less_and_less(folder: Path) -> list[tuple[bool, bool, str]]:
    """With plenty of memory, with what the second machine needs, with less there, and with none on the first;
    return whether saves were asynchronous, whether this rank has copies, and errors."""
    plenty = 2**30
    results, taken = [save_on_machines(folder / "plenty", (plenty, plenty))], [0] * dist.get_world_size()
    dist.all_gather_object(taken, results[0][1])
    needed = max(taken[2:])
    for free in ((plenty, needed), (plenty, needed - 1), (0, plenty)):
        results.append(save_on_machines(folder / str(free), free))
    return [(asynchronous, copied > 0, errors) for asynchronous, copied, errors in results]


def save_as_on_gpus(folder: Path, refused_on: int) -> tuple[str, list[str], int]:
    """Return the warning of make_room, the errors of two saves, and the number of this rank's copies, where
    saves need copies as on GPUs. On rank `refused_on` the system refuses the first allocation."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = nn.Linear(4, 3)  # three rows: the last of four ranks has none
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, OptimConfig())
    config, warnings = CheckpointConfig(every=1, on_error="warn"), [""]
    saver = CheckpointSaver(config, folder, model, optimizer, mesh, {}, lambda: 2**30)
    saver._on_cpu, empty = False, torch.empty

    def refuse(*size: Any, **options: Any) -> torch.Tensor:
        if dist.get_rank() == refused_on and "pin_memory" in options:
            raise RuntimeError("out of memory")
        return empty(*size, **options)

    with mock.patch.object(torch, "empty", refuse):
        saver.make_room(0, warnings.append)
        errors = [save(saver, 1).error]
    errors.append(save(saver, 2).error)
    return warnings[-1], errors, len(saver._copies)


def save_everywhere(folder: Path) -> tuple[list[Any], Any, Any]:
    on_machines = save_with_less_and_less(folder)
    return on_machines, save_as_on_gpus(folder / "enough", -1), save_as_on_gpus(folder / "refused", 1)


def test_all_ranks_decide_alike_whether_saves_are_asynchronous(tmp_path: Path) -> None:
    ranks = run_ranks(4, save_everywhere, tmp_path)
    for on_machines, (shortage, errors, copies), (refused, errors_of_refused, _) in ranks:
        assert on_machines == [(True, True, ""), (True, True, ""), (False, False, ""), (False, False, "")]
        assert (shortage, errors) == ("", ["", ""])
        assert copies >= 1, "the rank without a row has its random state"
        assert "host memory for copies of the training state" in refused
        assert "(out of memory)" in refused
        assert errors_of_refused[0] in refused
        assert errors_of_refused[1] == "", "no rank died, and the next save succeeds"
