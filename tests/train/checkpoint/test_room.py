"""Before the first step a run finds out whether it can save: the folder, the disk, and the dtype of every
tensor."""

import random
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from meshwright.train.checkpoint import commit as commit_module
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.reader import load_checkpoint
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.errors import ConfigError
from tests.support.checkpoint_saves import Trainer, names
from tests.support.launch import EAGER, TINY, read_status, run, write_text
from tests.support.worlds import run_ranks

FAULTS = {
    "none": "",
    "the disk is too small": "a checkpoint needs 1.",
    "a file in the place of the folder": "File exists",
    "the disk of one rank is full": "rank-00001.safetensors cannot be written (File too large)",
    "one node has no such folder": "rank-00001.safetensors cannot be written (No such file or directory)",
    "a dtype": "model.table (complex128) cannot be saved in this dtype",
}


def try_faults(folder: Path, on_error: str) -> dict[str, str]:
    """Return what each fault leads to: an error or a warning."""
    first, outcomes = dist.get_rank() == 0, dict[str, str]()
    for fault in FAULTS:
        trainer, place, warnings = Trainer(), folder / fault, [""]
        unlimited, limit = resource.getrlimit(resource.RLIMIT_FSIZE), 10 if "is full" in fault else -1
        if fault == "a file in the place of the folder":
            place.touch()
        if fault == "a dtype":
            trainer.model.register_buffer("table", torch.ones(3, dtype=torch.complex128))
        free = 1000 if "small" in fault else 10**9
        usage = mock.patch.object(
            commit_module.shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(10**9, 0, free)
        )
        saver = trainer.saver(
            place if first or "node" not in fault else folder / "other", every=5, on_error=on_error
        )
        if not first and limit > 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        try:
            with usage:
                saver.make_room(0, warnings.append)
            outcomes[fault] = warnings[-1]
        except ConfigError as error:
            outcomes[fault] = f"refused: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        dist.barrier()
        assert place.is_file() or not place.exists() or names(place) == [], "nothing is left"
    return outcomes


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_every_rank_learns_before_the_first_step_that_it_cannot_save(on_error: str, tmp_path: Path) -> None:
    one, other = run_ranks(2, try_faults, tmp_path, on_error)
    assert one == other
    start = "refused: " if on_error == "stop" else "warning: "
    for fault, message in FAULTS.items():
        if message:
            assert one[fault].startswith(f"{start}checkpoint.every=5, but no checkpoint can be saved: ")
            assert message in one[fault]
            assert ("try checkpoint.on_error=warn" in one[fault]) == (on_error == "stop")
        else:
            assert one[fault] == ""


def test_a_run_that_cannot_save_ends_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("/proc/nowhere")
    done = run(
        1, *TINY, *EAGER, *write_text(tmp_path), "--checkpoint.every=2", f"--run.dir={tmp_path / 'run'}"
    )
    assert done.returncode == 2
    assert "ConfigError: checkpoint.every=2, but no checkpoint can be saved: " in done.stderr
    assert "\nstep 1" not in done.stdout
    assert read_status(tmp_path / "run")["state"] == "failed"


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("way", ["by hand", "by a lower keep"])
def test_advice_about_a_full_disk_helps_when_it_is_followed(
    way: str, group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that checkpoints of this size fill before `keep` of them are there."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng, trainer, step = random.Random(seed), Trainer(), 0
    size = rng.randrange(4, 8) * 600_000 + 2**20

    def usage(folder: Path) -> Any:
        return shutil._ntuple_diskusage(size, 0, size - size_of(folder))

    monkeypatch.setattr(commit_module.shutil, "disk_usage", usage)
    while not (error := trainer.save(tmp_path, step := step + rng.randrange(1, 9), keep=20).error):
        pass
    *older, newest = list_checkpoints(tmp_path)
    assert f"or delete {', '.join(path.name for path in older[:3])}" in error
    assert f"({sum(map(size_of, older)) / 2**20:.1f} MiB)" in error
    keep = rng.randrange(1, 3) if "keep" in way else 20
    for path in older if way == "by hand" else ():
        shutil.rmtree(path)
    saver = trainer.saver(tmp_path, keep=keep, every=1)
    saver.make_room(int(newest.name[5:]), pytest.fail)
    assert newest in list_checkpoints(tmp_path)
    assert trainer.save(tmp_path, step, keep=keep).error == ""
    assert [verify_alone(path) for path in list_checkpoints(tmp_path)]


def make(dtype: torch.dtype, rows: int, rng: torch.Generator) -> torch.Tensor:
    """Drawn values[rows, 3]: of a float every sign and magnitude that is finite, else any bits."""
    if dtype.is_floating_point or dtype.is_complex:
        real = torch.randn(rows, 3, generator=rng)
        return (torch.complex(real, torch.randn(rows, 3, generator=rng)) if dtype.is_complex else real).to(
            dtype
        )
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (rows, 3 * dtype.itemsize), generator=rng)
    return bits.to(torch.uint8).view(dtype)


class Tables(nn.Module):
    """A buffer that each rank has, and a parameter that the ranks divide, of one dtype."""

    def __init__(self, dtype: torch.dtype, trainer: Trainer, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.register_buffer("table", make(dtype, 2, rng))
        local = make(dtype, 8, rng).tensor_split(dist.get_world_size())[dist.get_rank()].clone()
        parameter = nn.Parameter(DTensor.from_local(local, trainer.mesh, [Shard(0)]), requires_grad=False)
        self.split = parameter

    def content(self) -> list[bytes]:
        return [
            t.contiguous().view(torch.uint8).numpy().tobytes() for t in (self.table, self.split.to_local())
        ]


def round_trips(folder: Path, seed: int) -> dict[str, str]:
    """Save tables of each dtype of torch, and load them over others: "exact", or why not."""
    outcomes = {}
    for dtype in sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str):
        trainer, name = Trainer(), str(dtype).removeprefix("torch.")
        try:
            trainer.model, other = Tables(dtype, trainer, seed), Tables(dtype, trainer, seed + 1)
        except (RuntimeError, NotImplementedError, TypeError):  # a dtype without values, such as quint8
            continue
        trainer.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        try:
            trainer.saver(folder / name, every=1).make_room(0, print)
        except ConfigError as error:
            outcomes[name] = str(error)
            continue
        saved = trainer.save(folder / name, 1)
        assert saved.path, saved.error
        load_checkpoint(saved.path, verify_alone(saved.path), other, trainer.optimizer, trainer.mesh)
        with safe_open(saved.path / "rank-00000.safetensors", framework="pt") as file:
            assert file.get_tensor("model.table").dtype == dtype
        outcomes[name] = "exact" if other.content() == trainer.model.content() else "other values"
    return outcomes


def test_every_dtype_is_saved_exactly_or_refused_by_name(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    one, other = run_ranks(2, round_trips, tmp_path, seed)
    assert one == other
    exact = {name for name, outcome in one.items() if outcome == "exact"}
    integers = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    floats = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64", "complex64"]
    assert {*integers, *floats} <= exact
    for name in one.keys() - exact:
        assert f"model.split ({name}), model.table ({name}) cannot be saved in this dtype" in one[name]
    assert "complex128" in one
