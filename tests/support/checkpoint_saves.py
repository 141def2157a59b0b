"""A small sharded model with an optimizer, and saves of it: also on two ranks, one of which is killed or has
a fault."""

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
from meshwright.train.checkpoint.manifest import MODEL, TrainPosition
from meshwright.train.checkpoint.reader import open_checkpoint, read_full
from meshwright.train.checkpoint.save import CheckpointSaver, Saved
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config import CheckpointConfig, OptimConfig
from meshwright.train.optim.optimizer import build_optimizer
from tests.support.worlds import forked

RANKS = 2
TEXTS = {"config.yaml": "run: {}\n", "plan.yaml": "plan\n"}
# Where a rank is killed: before (or in) a call of the saving code (module and name), and which rank.
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
    """A model of 200 kB with its optimizer, sharded over all ranks, and its saver."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        self.model = nn.Linear(64, 256)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = build_optimizer(self.model, OptimConfig())

    @property
    def own_weight(self) -> torch.Tensor:
        """This rank's shard of the weight."""
        return self.model.weight.to_local().data  # type: ignore[operator]

    def saver(self, folder: Path, texts: dict[str, str] = TEXTS, **settings: Any) -> CheckpointSaver:
        return CheckpointSaver(
            CheckpointConfig(**settings), folder, self.model, self.optimizer, self.mesh, texts, lambda: 2**30
        )

    def save(self, folder: Path, step: int, texts: dict[str, str] = TEXTS, **settings: Any) -> Saved:
        return save(self.saver(folder, texts, **settings), step)


def save(saver: CheckpointSaver, step: int) -> Saved:
    """Save, and wait for the commit."""
    saver.save(TrainPosition(step, 8 * step, 0, 32, dist.get_world_size(), "data"))
    saver.wait()
    (saved,) = saver.poll()
    assert saver.failed == saved.error
    assert (saved.path is None) == bool(saved.error)
    return saved


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_with_one_killed(case: str, asynchronous: bool, folder: Path) -> list[str]:
    """Save steps 1 and 2 on two ranks and kill one in step 2: the error or the exit code of each rank."""
    folder.mkdir()
    with forked(RANKS, _rank_of_a_kill, case, asynchronous, folder, folder=folder) as ranks:
        codes = [rank.wait(60) for rank in ranks]
    return [
        (folder / f"error.{rank}").read_text() if code == 0 else f"exit {code}"
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
    (folder / f"error.{dist.get_rank()}").write_text(save(saver, 2).error)
    os._exit(0)  # a process group with a dead rank cannot be destroyed


def save_with_a_fault(fault: str, asynchronous: bool, folder: Path) -> tuple[str, list[str]]:
    """Save steps 1 to 3 on two ranks, with a fault of rank 1 alone in step 2: this rank's error, and the
    names in the folder after it. Runs on each rank."""
    trainer = Trainer()
    saver, weight, limit = (
        trainer.saver(folder, keep=1, asynchronous=asynchronous),
        trainer.own_weight,
        resource.RLIM_INFINITY,
    )
    assert save(saver, 1).error == ""
    good = weight[-1, -1].item()
    odd: dict[str, Any] = {"odd": object()} if fault == "state" and dist.get_rank() == 1 else {}
    state = trainer.optimizer.state[trainer.model.weight]
    state.update(odd)
    if dist.get_rank() == 1:
        weight[-1, -1] = float("nan") if fault == "NaN" else good
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if fault == "disk full" else limit, limit))
    error = save(saver, 2).error
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    weight[-1, -1] = good
    for name in odd:
        del state[name]
    dist.barrier()
    after = names(folder)
    dist.barrier()
    assert save(saver, 3).error == ""
    return error, after


def saved_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the full weights and buffers of a checkpoint by fqn, a tied one once."""
    manifest = verify_alone(checkpoint)
    files, names = open_checkpoint(checkpoint, manifest), [n for n in manifest.tensors if n.startswith(MODEL)]
    return {name.removeprefix(MODEL): read_full(files, manifest, name) for name in names}
