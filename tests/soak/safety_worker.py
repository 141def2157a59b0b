"""A rank of `tests.soak.safety`: saves and loads the same tensors with our CheckpointSaver and with torch's
distributed checkpoint alone.

Started by torchrun. Arguments: `disk` or `stall`, a folder, rounds, then config keys. Rank 0 writes
figures.json into the folder.
"""

import hashlib
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.parallel.mesh import build_mesh
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.load import load_checkpoint
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.checkpoint.shards import count_bytes, training_tensors
from meshwright.train.checkpoint.verify import verify_alone, verify_together
from meshwright.train.config import CheckpointConfig, Config, VerifyMode
from meshwright.train.config_parser import parse_config
from meshwright.train.data.batch import Batch
from meshwright.train.distributed.exit import end_process
from meshwright.train.distributed.process_group import start_process
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.model.build import build_model
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.planning.resolve import plan_run
from meshwright.train.step import train_step

# ours, verified; torch's checkpoint with its safetensors storage; torch's with its own storage
WAYS = ("ours", "safetensors", "plain")
HASHED_BYTES = 2**28
MICRO_BATCH, STEPS_BETWEEN, WARM_UP_STEPS = 4, 5, 3
PLENTY_BYTES = 2**50  # of host memory, whose size does not matter here


class Rank:
    """A sharded model with its optimizer, and the folder to save it into."""

    def __init__(self, folder: Path, config: Config) -> None:
        ranks = read_rank_info()
        self.plan = plan = plan_run(config.job, ranks.world_size, ranks.local_world_size)
        self.folder, self.config, self.mesh = folder, config, build_mesh(plan.mesh, "cpu")
        self.sharded = build_model(config.model, config.train, plan, self.mesh, config.run.seed)
        self.model: nn.Module = self.sharded.model
        self.optimizer = build_optimizer(self.model, config.optim)
        self.tensors = training_tensors(self.model, self.optimizer)

    def saver(self, asynchronous: bool) -> CheckpointSaver:
        """Return our saver, into the folder `ours`."""
        config = CheckpointConfig(asynchronous=asynchronous)
        return CheckpointSaver(
            config, self.folder / "ours", self.model, self.optimizer, self.mesh, {}, lambda: PLENTY_BYTES
        )

    def position(self, step: int) -> TrainPosition:
        return TrainPosition(step, 0, 0, 0, dist.get_world_size(), "")


def measure_disk(rank: Rank, rounds: int) -> dict[str, Any]:
    """Time saves, loads and hashes of all tensors, alternating."""
    size_gb = count_bytes(rank.tensors) / 1e9
    saves_s = time_saves(rank, rounds)
    newest = list_checkpoints(rank.folder / "ours")[-1]
    figures = {"size_gb": size_gb, "save_s": saves_s, "load_s": time_loads(rank, newest, rounds)}
    return {**figures, "hash_gb_s": time_hashes(newest, size_gb), "asynchronous_s": time_copies(rank, rounds)}


def time_saves(rank: Rank, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a save by each way, each time into an empty folder, with no pending writes."""
    saver, seconds = rank.saver(asynchronous=False), {way: list[float]() for way in WAYS}
    safetensors, plain = str(rank.folder / "safetensors"), str(rank.folder / "plain")

    def ours() -> None:
        saver.save(rank.position(1))
        (saved,) = saver.poll()
        assert not saved.error, saved.error

    works: Mapping[str, Callable[[], Any]] = {
        "ours": ours,
        "safetensors": lambda: save(
            rank.tensors, storage_writer=HuggingFaceStorageWriter(safetensors, save_distributed=True)
        ),
        "plain": lambda: save(rank.tensors, storage_writer=FileSystemWriter(plain)),
    }
    for turn in range(rounds):
        for i in range(len(WAYS)):
            way = WAYS[(turn + i) % len(WAYS)]
            on_main(lambda way=way: shutil.rmtree(rank.folder / way, ignore_errors=True))  # type: ignore[misc]
            seconds[way].append(timed(works[way]))
    return seconds


def time_loads(rank: Rank, ours: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of a load, by cache and way: ours with each way of verifying, and torch's two
    storages."""

    def verified(mode: VerifyMode) -> None:
        load_checkpoint(ours, verify_together(ours, mode), rank.model, rank.optimizer, rank.mesh)

    safetensors, plain = rank.folder / "safetensors", rank.folder / "plain"
    works: Mapping[str, tuple[Path, Callable[[], Any]]] = {
        "ours, verify=full": (ours, lambda: verified("full")),
        "ours, verify=size": (ours, lambda: verified("size")),
        "safetensors": (
            safetensors,
            lambda: load(rank.tensors, storage_reader=HuggingFaceStorageReader(str(safetensors))),
        ),
        "plain": (plain, lambda: load(rank.tensors, storage_reader=FileSystemReader(plain))),
    }
    seconds = {cache: {way: list[float]() for way in works} for cache in ("cold", "warm")}
    for _ in range(rounds):
        for cache, ways in seconds.items():
            for way, way_s in ways.items():
                folder, work = works[way]
                on_main(lambda folder=folder, cache=cache: set_cache(folder, cache))  # type: ignore[misc]
                way_s.append(timed(work))
    return seconds


def set_cache(folder: Path, cache: str) -> None:
    """Remove the folder's files from the page cache (cold), or read them into it as memory allows (warm)."""
    for path in sorted(folder.iterdir()):
        with open(path, "rb", buffering=0) as file:
            if cache == "cold":
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while cache == "warm" and file.read(2**24):
                pass


def time_hashes(checkpoint: Path, size_gb: float) -> dict[str, float]:
    """Return GB/s of SHA-256 in one thread, and of verifying a checkpoint in the page cache, by one rank and
    by all."""
    content = bytes(HASHED_BYTES)
    on_main(lambda: set_cache(checkpoint, "warm"))
    alone_s = timed(lambda: verify_alone(checkpoint) if dist.get_rank() == 0 else None)
    all_s = timed(lambda: verify_together(checkpoint, "full"))
    sha_s = timed(lambda: hashlib.sha256(content) if dist.get_rank() == 0 else None)
    return {
        "sha256": HASHED_BYTES / 1e9 / sha_s,
        "verify, one rank": size_gb / alone_s,
        "verify, all ranks": size_gb / all_s,
    }


def time_copies(rank: Rank, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that training waits for asynchronous saves (the first, which also allocates,
    separately), and the seconds until their commit."""
    saver, saves = rank.saver(asynchronous=True), []
    for step in range(rounds + 1):
        on_main(lambda: shutil.rmtree(rank.folder / "ours", ignore_errors=True))
        saver.save(rank.position(step + 1))
        saver.wait()
        saves += saver.poll()
    assert not any(saved.error for saved in saves), saves
    stalls_s = [saved.stall_s for saved in saves]
    return {
        "first_stall": stalls_s[:1],
        "stall": stalls_s[1:],
        "committed": [saved.total_s for saved in saves[1:]],
    }


def measure_stall(rank: Rank, rounds: int) -> dict[str, Any]:
    """Return the seconds of training steps: those that save, those during which the checkpoint is written,
    and all others."""
    tokens = torch.randint(0, 256, (MICRO_BATCH, rank.config.train.seq_len + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    saver = rank.saver(asynchronous=True)
    seconds: dict[str, list[float]] = {"normal": [], "saving": [], "beside writing": []}
    for step in range(1, WARM_UP_STEPS + (rounds + 1) * STEPS_BETWEEN + 1):
        saving = step % STEPS_BETWEEN == 0
        start_s = time.perf_counter()
        train_step(rank.sharded, rank.optimizer, [batch], 1.0, loss_of_forward)
        if saving:
            saver.save(rank.position(step))
        took_s = time.perf_counter() - start_s
        if step > WARM_UP_STEPS + STEPS_BETWEEN:  # the first save allocates
            kind = "saving" if saving else "beside writing" if step % STEPS_BETWEEN == 1 else "normal"
            seconds[kind].append(took_s)
    saver.wait()
    saves = saver.poll()
    assert not any(saved.error for saved in saves), saves
    total_s = statistics.median(saved.total_s for saved in saves[1:])
    return {"size_gb": count_bytes(rank.tensors) / 1e9, "step_s": seconds, "committed_s": total_s}


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds until every rank is done."""
    dist.barrier()
    start_s = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start_s


def on_main(work: Callable[[], Any]) -> None:
    """Do the work on rank 0 while the others wait; afterwards no writes are pending."""
    if dist.get_rank() == 0:
        work()
        os.sync()
    dist.barrier()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch's warnings about its storages
    kind, target, rounds, *keys = sys.argv[1:]
    config = parse_config(keys)
    start_process(config.run, read_rank_info(), torch.device("cpu"))
    measure = {"disk": measure_disk, "stall": measure_stall}[kind]
    figures = measure(Rank(Path(target), config), int(rounds))
    if dist.get_rank() == 0:
        (Path(target) / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()
    end_process(0)
