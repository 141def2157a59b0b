"""Saves that are cut short, on two ranks: each case in two new processes. Run by test_checkpoint_save.py.

Argument: a folder, in which each case gets one of its own. Prints one JSON object a case: its name, what is in the folder then,
and what each rank heard of the save that failed.
"""

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.mesh import build_mesh
from tests.support.launch import EAGER, TINY
from train.build import build_model
from train.checkpoint import folder as folder_module
from train.checkpoint import saver as saver_module
from train.checkpoint import shard_file
from train.checkpoint.config import CheckpointConfig
from train.checkpoint.manifest import Position
from train.checkpoint.saver import Saved, Saver
from train.config import parse_config
from train.optim import build_optimizer
from train.planning import plan_run

RANKS = 2
# Where a rank is killed: before (or in) which call of the saving code, and of which rank.
KILLS: dict[str, tuple[Any, str, int]] = {
    "before room is made": (saver_module, "begin_save", 0),
    "before its shard": (saver_module, "write_shard_file", 0),
    "in its shard": (shard_file.os, "fsync", 0),
    "in the other's shard": (shard_file.os, "fsync", 1),
    "before the config": (saver_module, "write_synced", 0),
    "before the manifest": (folder_module, "write_synced", 0),
    "before the rename": (folder_module, "flush_folder", 0),
    "after the rename": (folder_module, "_sync_parent", 0),
    "before retention": (saver_module, "delete_others", 0),
    "in a deletion": (shutil, "rmtree", 0),
}


def kill_at(module: Any, name: str) -> None:
    """From now on the call of this name is the end."""
    setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def build_saver(asynchronous: bool, checkpoints: Path) -> tuple[Any, Saver]:
    config = parse_config([*TINY, *EAGER])
    plan = plan_run(config, RANKS)
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, torch.device("cpu"))
    settings = CheckpointConfig(keep=1, asynchronous=asynchronous)
    texts = {"config.yaml": "run: {}\n", "plan.yaml": "plan\n"}
    return model, Saver(settings, checkpoints, model, build_optimizer(model, config.optim), mesh, texts, lambda: 2**30)


def save(saver: Saver, step: int) -> Saved:
    saver.save(Position(step, step * 8, 0, 32, RANKS, "data"))
    saver.wait()
    (news,) = saver.news()
    return news


def rank_of_a_case(rank: int, case: str, asynchronous: bool, folder: Path) -> str:
    """Saves step 1, and step 2 with the fault; what it heard of that, or "" where it was saved."""
    model, saver = build_saver(asynchronous, folder / "checkpoints")
    assert save(saver, 1).error == ""
    dist.barrier()
    if case in KILLS and rank == KILLS[case][2]:
        kill_at(*KILLS[case][:2])
    if case == "disk full on one rank" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    weight = next(model.parameters()).to_local()
    good = weight[-1, -1].item()
    if case == "NaN on one rank" and rank == 1:
        weight.data[-1, -1] = float("nan")
    error = save(saver, 2).error
    if case not in KILLS:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
        if rank == 0:
            (folder / "after").write_text(json.dumps(names(folder / "checkpoints")))
        weight.data[-1, -1] = good
        dist.barrier()
        assert save(saver, 3).error == ""
    return error


def names(checkpoints: Path) -> list[str]:
    return sorted(os.listdir(checkpoints))


def in_processes(case: str, asynchronous: bool, folder: Path) -> list[str]:
    """What each rank heard, or how it ended."""
    children = []
    for rank in range(RANKS):
        if (child := os.fork()) == 0:
            code = 1
            try:
                code = run_rank(rank, case, asynchronous, folder)
            finally:
                os._exit(code)  # whatever happens, this is not the parent
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [(folder / f"heard.{rank}").read_text() if code == 0 else f"exit {code}" for rank, code in enumerate(codes)]


def run_rank(rank: int, case: str, asynchronous: bool, folder: Path) -> int:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
        (folder / f"heard.{rank}").write_text(rank_of_a_case(rank, case, asynchronous, folder))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_case(folder: Path, case: str, asynchronous: bool) -> dict[str, Any]:
    folder.mkdir()
    heard = in_processes(case, asynchronous, folder)
    after = names(folder / "checkpoints") if case in KILLS else json.loads((folder / "after").read_text())
    return {"case": case, "heard": heard, "after": after, "checkpoints": str(folder / "checkpoints")}


def list_cases() -> list[tuple[str, bool]]:
    """Kills, every other one while training could go on; and what one rank alone meets with, both ways."""
    both = [(case, asynchronous) for case in ("disk full on one rank", "NaN on one rank") for asynchronous in (False, True)]
    return [*((case, number % 2 == 0) for number, case in enumerate(KILLS)), *both]


if __name__ == "__main__":
    for number, (case, asynchronous) in enumerate(list_cases()):
        print(json.dumps(run_case(Path(sys.argv[1]) / str(number), case, asynchronous)), flush=True)
