"""A save: copied while the training waits, written and committed beside it by a thread on every rank.

The threads of all ranks agree over a process group of their own: rank 0 makes room, everybody writes and
hashes a file, rank 0 commits. Either the checkpoint is there on the word of every rank, or nothing of it is.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.errors import one_line
from meshwright.train.checkpoint.commit import abandon, begin_save, commit, delete_others, write_synced
from meshwright.train.checkpoint.host_buffers import RoomAsked, copy_bytes, describe_missing
from meshwright.train.checkpoint.manifest import (
    CheckpointManifest,
    SavedFile,
    SavedTensor,
    TrainPosition,
    describe_tensor,
)
from meshwright.train.checkpoint.shards import (
    TensorShard,
    needed_bytes,
    own_shards,
    random_state,
    training_tensors,
    write_shard_file,
)
from meshwright.train.checkpoint.verify import hash_file
from meshwright.train.config import CheckpointConfig
from meshwright.train.distributed.ranks import gather_from_all
from meshwright.train.errors import ConfigError, SaveError
from meshwright.train.memory import free_host_bytes

_MANIFEST_BYTES = 2**20  # of room asked for beyond the ranks' files: manifest, config and plan


@dataclass(frozen=True)
class Saved:
    """What became of a save: the checkpoint, or the `error` that left nothing of it; and seconds, those for
    which the training stood still and those until it was committed."""

    step: int
    path: Path | None
    error: str
    stall_s: float
    total_s: float


@dataclass(frozen=True)
class _Job:
    """A save under way. `limits`: least and largest value of each of this rank's parts, in the order of
    `shards`; `problem`: why there are none."""

    position: TrainPosition
    shards: dict[str, TensorShard]
    limits: Tensor
    tensors: dict[str, SavedTensor]
    needed_bytes: int
    start_s: float
    stall_s: float
    problem: str


class CheckpointSaver:
    """Saves a run's model, optimizer and random state into `folder`, with some `texts` beside them, by file
    name. Every rank makes one, and calls it at the same steps; a save never overlaps the one before."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        texts: Mapping[str, str],
        host_bytes: Callable[[], int] = free_host_bytes,
        machine: int = 0,
    ) -> None:
        """`host_bytes`: how much host memory this machine has left; `machine`: a number that the ranks on it
        share."""
        self._config, self._folder, self._texts = config, folder, dict(texts)
        self._host_bytes, self._machine = host_bytes, machine
        self._model, self._optimizer, self._mesh = model, optimizer, mesh
        # Writing takes its time; a rank that is gone is an error at once, one that is stuck is the
        # watchdog's.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        # Of the whole model: what is alike on all ranks, of which one may have nothing to write but its
        # random state.
        self._on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._room = False  # whether all machines have enough host memory for the copies, as far as was asked
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._news: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        self._asynchronous = config.asynchronous
        self.failed = ""  # why the last save has failed
        self.cut_off = ""  # why the ranks no longer hear each other: nothing is saved from then on

    def save(self, position: TrainPosition) -> None:
        """Start a save; with `checkpoint.asynchronous` training may go on at once, as soon as the copy is
        made. It fails at once, with the same words, after one that was cut off: who knows which of its
        messages are still on their way."""
        self.wait()
        if self.cut_off:
            self._news.put(Saved(position.step, None, self.cut_off, 0.0, 0.0))
            return
        start_s = time.perf_counter()
        tensors, random = training_tensors(self._model, self._optimizer), random_state()
        shards = self._own_shards(tensors, random)
        limits = _limits(shards[name] for name in shards if name not in random)
        described = {name: describe_tensor(tensor) for name, tensor in {**tensors, **random}.items()}
        needed = needed_bytes(tensors, random, dist.get_world_size()) + _MANIFEST_BYTES
        try:
            problem = self._take_room(shards)
        except RuntimeError as failed:  # of a call to the other ranks
            self.failed = self._was_cut_off(position.step, failed)
            self._news.put(Saved(position.step, None, self.cut_off, 0.0, time.perf_counter() - start_s))
            return
        copies = {} if problem else self._copy(shards)
        job = _Job(
            position, copies, limits.cpu(), described, needed, start_s, time.perf_counter() - start_s, problem
        )
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-saver", daemon=True)
        self._thread.start()
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way has been committed, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def poll(self) -> list[Saved]:
        """What has become of saves since the last call."""
        return [self._news.get() for _ in range(self._news.qsize())]

    def make_room(self) -> str:
        """On GPUs take the host memory for the copies, which saves need, already now; every rank calls it.
        Returns why there is not enough, the same on all ranks, or "". On a CPU nothing is taken ahead:
        without room the training waits for saves."""
        if self._on_cpu:
            return ""
        shards = self._own_shards(training_tensors(self._model, self._optimizer), random_state())
        return next(filter(None, gather_from_all(self._take_room(shards), self._group)), "")

    def _own_shards(
        self, tensors: Mapping[str, Tensor], random: Mapping[str, Tensor]
    ) -> dict[str, TensorShard]:
        states = {name: TensorShard(state, (0,) * state.dim()) for name, state in random.items()}
        return own_shards(tensors, self._mesh) | states

    def _take_room(self, shards: Mapping[str, TensorShard]) -> str:
        """Memory for the copies, kept for later saves; or why there is none. On a CPU the training waits
        instead."""
        if self._on_cpu and not self._config.asynchronous:
            return ""
        values = {name: shard.values for name, shard in shards.items()}
        if not self._room and (missing := self._ask_room(values.values())):
            self._asynchronous = self._config.asynchronous and not self._on_cpu
            return "" if self._on_cpu else missing
        self._room, self._asynchronous = True, self._config.asynchronous
        try:
            self._copies = self._copies or {
                name: torch.empty(value.shape, dtype=value.dtype, pin_memory=not value.is_cpu)
                for name, value in values.items()
            }
        except RuntimeError as error:  # as torch says that the system refuses, for whatever reason
            return (
                f"host memory for copies of the training state cannot be taken ({one_line(str(error), 200)})"
            )
        return ""

    def _ask_room(self, values: Iterable[Tensor]) -> str:
        """What is missing for the copies of all ranks, or "": all of them ask, before any takes its part, and
        hear the same."""
        mine = RoomAsked(self._machine, copy_bytes(values), self._host_bytes())
        return describe_missing(gather_from_all(mine, self._group))

    def _copy(self, shards: dict[str, TensorShard]) -> dict[str, TensorShard]:
        """The shards in host memory, where the training does not change them, if it goes on."""
        if not self._asynchronous and self._on_cpu:
            return shards
        copied = {
            name: TensorShard(self._copies[name].copy_(shard.values, non_blocking=True), shard.offsets)
            for name, shard in shards.items()
        }
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copied

    def _run(self, job: _Job) -> None:
        path, error = None, ""
        try:
            path = self._write(job)
        except SaveError as failed:
            error = str(failed)
        except Exception as failed:  # a thread has nobody to raise to: the loop hears of it through `news`
            error = self._was_cut_off(job.position.step, failed)
        self.failed = error
        stall_s = job.stall_s if self._asynchronous else time.perf_counter() - job.start_s
        self._news.put(Saved(job.position.step, path, error, stall_s, time.perf_counter() - job.start_s))

    def _was_cut_off(self, step: int, failed: Exception) -> str:
        said = one_line(str(failed).strip().rpartition("\n")[2])
        self.cut_off = f"the save of step {step} was cut off, as by the death of another process ({said})"
        return self.cut_off

    def _write(self, job: _Job) -> Path:
        """Write this rank's file and take part in the commit. Raises SaveError on all ranks alike."""
        step, main = job.position.step, dist.get_rank() == 0
        partial = self._folder / f".step-{step:08d}.partial"
        try:
            self._agree(
                (step, "room"),
                _attempt(lambda: begin_save(self._folder, step, job.needed_bytes)) if main else None,
            )
            parts = self._gather((step, "part"), _attempt(lambda: self._write_part(partial, job)))
            return Path(
                self._agree(
                    (step, "commit"), _attempt(lambda: self._commit(partial, job, parts)) if main else None
                )
            )
        except SaveError:
            if main:
                abandon(self._folder, step)
            raise

    def _write_part(self, partial: Path, job: _Job) -> tuple[str, SavedFile, dict[str, SavedTensor]]:
        """This rank's file. Raises SaveError if it cannot be written, or a value is not finite."""
        if job.problem:
            raise SaveError(job.problem)
        rank = dist.get_rank()
        bad = [
            name
            for name, finite in zip(job.shards, job.limits.isfinite().all(1).tolist(), strict=False)
            if not finite
        ]
        if bad:
            raise SaveError(
                f"{bad[0]}{f' and {len(bad) - 1} more' if len(bad) > 1 else ''} is not finite on rank "
                f"{rank}, and nothing that is not finite is committed"
            )
        name = f"rank-{rank:05d}.safetensors"
        try:
            file = write_shard_file(partial / name, job.shards)
        except OSError as error:
            raise SaveError(f"{partial / name} cannot be written ({error.strerror})") from None
        return name, file, {key: tensor for key, tensor in job.tensors.items() if key.startswith("random.")}

    def _commit(
        self, partial: Path, job: _Job, parts: list[tuple[str, SavedFile, dict[str, SavedTensor]]]
    ) -> Path:
        tensors = {name: tensor for name, tensor in job.tensors.items() if not name.startswith("random.")}
        files = {name: file for name, file, _ in parts}
        for _, _, random in parts:
            tensors |= random
        try:
            for name, text in self._texts.items():
                write_synced(partial / name, text)
                files[name] = hash_file(partial / name)
        except OSError as error:
            raise SaveError(f"{partial} cannot be written ({error.strerror})") from None
        path = commit(partial, CheckpointManifest(job.position, files, tensors))
        delete_others(self._folder, self._config.keep, self._config.keep_every)
        return path

    def _agree(self, stage: tuple[int, str], outcome: Any) -> Any:
        """Rank 0's outcome of a stage on every rank: returned, or if it is an error raised."""
        box = [(stage, outcome)]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return self._unless_error(stage, *box[0])

    def _gather(self, stage: tuple[int, str], outcome: Any) -> list[Any]:
        """Every rank's outcome of a stage on every rank; the first error among them is raised."""
        outcomes = gather_from_all((stage, outcome), self._group)
        return [self._unless_error(stage, *each) for each in outcomes]

    def _unless_error(self, stage: tuple[int, str], theirs: tuple[int, str], outcome: Any) -> Any:
        """What a rank has sent, if it is no error and of this stage: after a call that has failed on one rank
        alone, the ranks would take one thing for another. That is the end of saving, as if it had been cut
        off."""
        if theirs != stage:
            here, there = f"{stage[1]} of step {stage[0]}", f"{theirs[1]} of step {theirs[0]}"
            self.cut_off = (
                f"the save of step {stage[0]} was cut off: processes are out of step ({here} here, {there} "
                "there)"
            )
            raise SaveError(self.cut_off)
        if isinstance(outcome, SaveError):
            raise outcome
        return outcome


def _attempt(work: Any) -> Any:
    """What the work returns, or the error it ends with: the other ranks wait to hear of either."""
    try:
        return work()
    except SaveError as error:
        return error
    except Exception as error:
        return SaveError(f"{type(error).__name__}: {error}")


def _limits(shards: Iterable[TensorShard]) -> Tensor:
    """limits[shards, 2]: least and largest value of each, where they lie; both NaN where one is. One pass
    over the memory."""
    limits = [limit.float() for shard in shards for limit in shard.values.aminmax()]
    return torch.stack(limits).reshape(-1, 2) if limits else torch.zeros(0, 2)


def make_room(saver: CheckpointSaver, config: CheckpointConfig, warn: Callable[[str], None]) -> None:
    """Have the saver of a run that saves take its host memory, before hours are trained that could not be
    saved. Raises ConfigError where there is too little."""
    if not config.every or not (missing := saver.make_room()):
        return
    if config.on_error == "stop":
        raise ConfigError(
            f"checkpoint.every={config.every}, but {missing}. Train on more machines, with fewer processes "
            "on each or more memory (of a container: its limit), or try with checkpoint.on_error=warn"
        )
    warn(f"warning: saves will fail unless memory becomes free: {missing}")
