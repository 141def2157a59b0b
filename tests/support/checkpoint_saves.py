"""A small sharded model with an optimizer, and saves of it: also on two ranks, of which one is killed or
meets with a fault."""

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.train.checkpoint import commit as commit_module
from meshwright.train.checkpoint import save as save_module
from meshwright.train.checkpoint import shards
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver, Saved
from meshwright.train.config import CheckpointConfig, OptimConfig
from meshwright.train.optim.optimizer import build_optimizer
from tests.support.worlds import forked

RANKS = 2
TEXTS = {"config.yaml": "run: {}\n", "plan.yaml": "plan\n"}
# Where a rank is killed: before (or in) which call of the saving code, and of which rank.
KILLS: dict[str, tuple[Any, str, int]] = {
    "before room is made": (save_module, "begin_save", 0),
    "before its shard": (save_module, "write_shard_file", 0),
    "in its shard": (shards.os, "fsync", 0),
    "in the other's shard": (shards.os, "fsync", 1),
    "before the config": (save_module, "write_synced", 0),
    "before the manifest": (commit_module, "write_synced", 0),
    "before the rename": (commit_module, "flush_folder", 0),
    "after the rename": (commit_module, "_sync_parent", 0),
    "before retention": (save_module, "delete_others", 0),
    "in a deletion": (shutil, "rmtree", 0),
}


class Trainer:
    """A model of 200 kB with its optimizer, sharded over all ranks, and what saves them."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        self.model = nn.Linear(64, 256)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = build_optimizer(self.model, OptimConfig())

    @property
    def own_weight(self) -> torch.Tensor:
        """This rank's part of the weight."""
        return self.model.weight.to_local().data  # type: ignore[operator]

    def saver(self, folder: Path, texts: dict[str, str] = TEXTS, **settings: Any) -> CheckpointSaver:
        return CheckpointSaver(
            CheckpointConfig(**settings), folder, self.model, self.optimizer, self.mesh, texts, lambda: 2**30
        )

    def save(self, folder: Path, step: int, texts: dict[str, str] = TEXTS, **settings: Any) -> Saved:
        return save(self.saver(folder, texts, **settings), step)


def save(saver: CheckpointSaver, step: int) -> Saved:
    """A save from beginning to end."""
    saver.save(TrainPosition(step, 8 * step, 0, 32, dist.get_world_size(), "data"))
    saver.wait()
    (news,) = saver.poll()
    assert saver.failed == news.error
    assert (news.path is None) == bool(news.error)
    return news


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_with_one_killed(case: str, asynchronous: bool, folder: Path) -> list[str]:
    """Steps 1 and 2 are saved on two ranks, and in step 2 one is killed: what each of them heard of that, or
    how it ended."""
    folder.mkdir()
    with forked(RANKS, _rank_of_a_kill, case, asynchronous, folder, folder=folder) as ranks:
        codes = [rank.wait(60) for rank in ranks]
    return [
        (folder / f"heard.{rank}").read_text() if code == 0 else f"exit {code}"
        for rank, code in enumerate(codes)
    ]


def _rank_of_a_kill(case: str, asynchronous: bool, folder: Path) -> None:
    dist.init_process_group("gloo")
    saver = Trainer().saver(folder / "checkpoints", keep=1, asynchronous=asynchronous)
    assert save(saver, 1).error == ""
    dist.barrier()
    module, name, killed = KILLS[case]
    if dist.get_rank() == killed:
        setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    (folder / f"heard.{dist.get_rank()}").write_text(save(saver, 2).error)
    os._exit(0)  # a process group of which one is dead is not taken down


def save_with_a_fault(fault: str, asynchronous: bool, folder: Path) -> tuple[str, list[str]]:
    """Steps 1 to 3 are saved on two ranks, and in step 2 rank 1 alone meets with a fault: what this rank
    hears of it, and what is in the folder then. Runs on each rank."""
    trainer = Trainer()
    saver, weight, limit = (
        trainer.saver(folder, keep=1, asynchronous=asynchronous),
        trainer.own_weight,
        resource.RLIM_INFINITY,
    )
    assert save(saver, 1).error == ""
    good = weight[-1, -1].item()
    if dist.get_rank() == 1:
        weight[-1, -1] = float("nan") if fault == "NaN" else good
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if fault == "disk full" else limit, limit))
    error = save(saver, 2).error
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    weight[-1, -1] = good
    dist.barrier()
    after = names(folder)
    dist.barrier()
    assert save(saver, 3).error == ""
    return error, after
