"""Asynchronous saves: state is copied to host memory while training waits, then a background thread on each
rank writes and commits it.

The threads agree over a separate process group: rank 0 prepares the folder, every rank writes and hashes its
file, and rank 0 commits. A checkpoint is committed only if all ranks succeed; otherwise nothing of it
remains.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.errors import one_line
from meshwright.train.checkpoint.commit import (
    abandon,
    begin_save,
    commit,
    delete_others,
    step_name,
    write_synced,
)
from meshwright.train.checkpoint.layout import RANDOM, STATE
from meshwright.train.checkpoint.manifest import (
    CheckpointManifest,
    SavedFile,
    SavedTensor,
    TrainPosition,
    hash_file,
    rank_file,
)
from meshwright.train.checkpoint.shards import (
    TensorShard,
    degrees,
    describe_tensor,
    needed_bytes,
    own_shards,
    random_state,
    training_tensors,
    write_shard_file,
)
from meshwright.train.config import CheckpointConfig
from meshwright.train.distributed.agreement import gather_from_all
from meshwright.train.errors import ConfigError, SaveError
from meshwright.train.memory import free_host_bytes

_Part = tuple[str, SavedFile, dict[str, SavedTensor]]  # of a rank: its file, and its random state
_MANIFEST_BYTES = 2**20  # disk space for the manifest, in addition to the ranks' files and the texts


@dataclass(frozen=True)
class Saved:
    """The result of a save: the checkpoint's `path`, or the `error` after which nothing of it remains;
    `stall_s`: seconds that training waited; `total_s`: seconds until the commit or the failure."""

    step: int
    path: Path | None
    error: str
    stall_s: float
    total_s: float


@dataclass(frozen=True)
class _Job:
    """A save in progress. `limits`: minimum and maximum of each of this rank's shards, in the order of
    `shards`; `problem`: why there are no shards; `trial`: of a save that is not committed."""

    position: TrainPosition
    shards: dict[str, TensorShard]
    limits: Tensor
    tensors: dict[str, SavedTensor]
    needed_bytes: int
    start_s: float
    stall_s: float
    problem: str
    trial: bool = False


class CheckpointSaver:
    """Saves a run's model, optimizer and random state into `folder`, together with `texts` by file name.
    Every rank creates one and calls it at the same steps; saves never overlap."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        texts: Mapping[str, str | bytes],
        host_bytes: Callable[[], int] = free_host_bytes,
        machine: int = 0,
        group_timeout: timedelta | None = None,
        hooks: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """`host_bytes` returns the free host memory of this machine; `machine` is a number shared by its
        ranks; `group_timeout`: of the collectives of a save; None: torch's default; `hooks`: returns
        the state of hooks (`hooks.state_of`), always of the same names, shapes and dtypes."""
        self._config, self._folder, self._texts = config, folder, dict(texts)
        self._texts_bytes = _MANIFEST_BYTES + sum(map(len, texts.values()))
        self._host_bytes, self._machine = host_bytes, machine
        self._model, self._optimizer, self._mesh, self._hooks = model, optimizer, mesh, hooks
        self._hook_state = {name: describe_tensor(tensor) for name, tensor in hooks().items()}
        # A group of its own: saves run beside training.
        self._group = dist.new_group(backend="gloo", timeout=group_timeout, group_desc="checkpoint")
        # Decided by the full model, so that all ranks agree: a rank may have only its random state to write.
        self._on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._enough_memory = False  # whether all machines were found to have enough for the copies
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._results: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        self._asynchronous = config.asynchronous
        self.failed = ""  # why the last save failed
        self.cut_off = ""  # why the ranks can no longer communicate: all later saves fail

    def save(self, position: TrainPosition) -> None:
        """Start a save. With `checkpoint.asynchronous`, training may continue as soon as the copy is made.

        After a save that was cut off every save fails immediately with the same error, because messages of
        the failed one may still arrive.
        """
        self.wait()
        if self.cut_off:
            self._results.put(Saved(position.step, None, self.cut_off, 0.0, 0.0))
            return
        start_s = time.perf_counter()
        try:
            tensors, random = self._tensors(), random_state()
            shards = self._own_shards(tensors, random)
            problem = self._allocate_copies(shards)
        except RuntimeError as failed:  # of a collective, or the SaveError of a tensor, on all ranks
            known = isinstance(failed, SaveError)
            self.failed = str(failed) if known else self._cut_off_after(position.step, failed)
            self._results.put(Saved(position.step, None, self.failed, 0.0, time.perf_counter() - start_s))
            return
        # the state of hooks may be infinite, such as the best loss so far
        limits = _limits(shards[name] for name in shards if not name.startswith((RANDOM, STATE)))
        described = {name: describe_tensor(tensor) for name, tensor in {**tensors, **random}.items()}
        needed = needed_bytes(tensors, random, dist.get_world_size()) + self._texts_bytes
        copies = {} if problem else self._copy(shards)
        job = _Job(
            position, copies, limits.cpu(), described, needed, start_s, time.perf_counter() - start_s, problem
        )
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-saver", daemon=True)
        self._thread.start()
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress is committed or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the save in progress, and destroy the process group. Every rank calls it."""
        self.wait()
        dist.destroy_process_group(self._group)

    def poll(self) -> list[Saved]:
        """Return the results of saves since the last call."""
        return [self._results.get() for _ in range(self._results.qsize())]

    def make_room(self, step: int, warn: Callable[[str], None]) -> None:
        """Try before the first step, after `step` steps of earlier starts, whether a run that saves can save,
        with an empty file from each rank and, on a GPU, the host memory for the copies, which is kept. Every
        rank calls it. Raises ConfigError on all ranks if not, or only warns with checkpoint.on_error=warn."""
        if not self._config.every:
            return
        try:
            tensors, random = self._tensors(), random_state()
            needed = needed_bytes(tensors, random, dist.get_world_size()) + self._texts_bytes
            problem = "" if self._on_cpu else self._allocate_copies(self._own_shards(tensors, random))
            nothing = torch.zeros(0, 2)
            self._write(_Job(TrainPosition(step + 1), {}, nothing, {}, needed, 0.0, 0.0, problem, trial=True))
        except SaveError as error:
            message = f"checkpoint.every={self._config.every}, but no checkpoint can be saved: {error}"
            if self._config.on_error == "stop":
                raise ConfigError(f"{message}. To train all the same, try checkpoint.on_error=warn") from None
            warn(f"warning: {message}")

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that training changes. Raises SaveError."""
        hooks = self._hooks()
        described = {name: describe_tensor(tensor) for name, tensor in hooks.items()}
        if described != self._hook_state:
            raise SaveError("state() of a hook has other names, shapes or dtypes than at the start")
        return {**training_tensors(self._model, self._optimizer), **hooks}

    def _own_shards(
        self, tensors: Mapping[str, Tensor], random: Mapping[str, Tensor]
    ) -> dict[str, TensorShard]:
        states = {name: TensorShard(state, (0,) * state.dim()) for name, state in random.items()}
        return own_shards(tensors, self._mesh) | states

    def _allocate_copies(self, shards: Mapping[str, TensorShard]) -> str:
        """Allocate memory for the copies and keep it for later saves. Returns why that is impossible, or "".
        On a CPU with too little memory, saves become synchronous instead."""
        if self._on_cpu and self._config.asynchronous:
            self._enough_memory = self._enough_memory or self._have_room(shards)
            self._asynchronous = self._enough_memory
        if self._on_cpu and not self._asynchronous:
            return ""
        try:
            self._copies = self._copies or {
                name: torch.empty(
                    shard.values.shape, dtype=shard.values.dtype, pin_memory=not shard.values.is_cpu
                )
                for name, shard in shards.items()
            }
        except RuntimeError as error:  # torch's error if the system refuses the allocation
            why = one_line(error, 200)
            return f"host memory for copies of the training state cannot be allocated ({why})"
        return ""

    def _have_room(self, shards: Mapping[str, TensorShard]) -> bool:
        """Return whether each machine has the memory for the copies of its ranks, the same on all ranks: all
        report before any allocates."""
        own_bytes = sum(shard.values.nbytes for shard in shards.values())
        needed_bytes, free_bytes = Counter[int](), dict[int, int]()
        reports = gather_from_all((self._machine, own_bytes, self._host_bytes()), self._group)
        for machine, needed, free in reports:
            needed_bytes[machine] += needed
            free_bytes[machine] = min(free, free_bytes.get(machine, free))
        return all(needed_bytes[machine] <= free_bytes[machine] for machine in free_bytes)

    def _copy(self, shards: dict[str, TensorShard]) -> dict[str, TensorShard]:
        """Return the shards in host memory, where training cannot change them; the shards themselves if
        training waits for the save and they are on a CPU."""
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
        except Exception as failed:  # the training loop gets it from `poll`
            error = self._cut_off_after(job.position.step, failed)
        self.failed = error
        stall_s = job.stall_s if self._asynchronous else time.perf_counter() - job.start_s
        self._results.put(Saved(job.position.step, path, error, stall_s, time.perf_counter() - job.start_s))

    def _cut_off_after(self, step: int, failed: Exception) -> str:
        """Set and return `cut_off` after a failed collective."""
        message = one_line(str(failed).strip().rpartition("\n")[2])
        self.cut_off = (
            f"the save of step {step} was cut off, probably by the death of another process ({message})"
        )
        return self.cut_off

    def _write(self, job: _Job) -> Path:
        """Write this rank's file and take part in the commit. If one rank fails, all raise SaveError."""
        step, main = job.position.step, dist.get_rank() == 0
        folder = self._folder / f".step-{step:08d}.partial"
        keep = (self._config.keep, self._config.keep_every) if job.trial else None
        begin = partial(begin_save, self._folder, step, job.needed_bytes, keep)
        try:
            self._agree((step, "room"), _attempt(begin) if main else None)
            parts = self._gather((step, "part"), _attempt(lambda: self._write_part(folder, job)))
            committed = _attempt(lambda: self._commit(folder, job, parts)) if main else None
            return Path(self._agree((step, "commit"), committed))
        except SaveError:
            if main:
                abandon(self._folder, step)
            raise

    def _write_part(self, partial: Path, job: _Job) -> _Part:
        """Write this rank's file. Raises SaveError if it cannot be written, or if a value is not finite."""
        if job.problem:
            raise SaveError(job.problem)
        rank = dist.get_rank()
        finite = job.limits.isfinite().all(1).tolist()
        if bad := [name for name, good in zip(job.shards, finite, strict=False) if not good]:
            raise SaveError(
                f"{bad[0]}{f' and {len(bad) - 1} more are' if len(bad) > 1 else ' is'} not finite on rank "
                f"{rank}, so the checkpoint is not committed"
            )
        name = rank_file(rank)
        try:
            file = write_shard_file(partial / name, job.shards)
        except OSError as error:
            raise SaveError(f"{self._named(job) / name} cannot be written ({error.strerror})") from None
        return name, file, {key: tensor for key, tensor in job.tensors.items() if key.startswith("random.")}

    def _named(self, job: _Job) -> Path:
        """Return the name that a message gives the checkpoint; its partial folder is gone by then."""
        return self._folder / step_name(job.position.step)

    def _commit(self, partial: Path, job: _Job, parts: Sequence[_Part]) -> Path:
        if job.trial:
            abandon(self._folder, job.position.step)
            return partial
        tensors = {name: tensor for name, tensor in job.tensors.items() if not name.startswith("random.")}
        files = {name: file for name, file, _ in parts}
        for _, _, random in parts:
            tensors |= random
        try:
            for name, text in self._texts.items():
                write_synced(partial / name, text)
                files[name] = hash_file(partial / name)
        except OSError as error:
            raise SaveError(f"{self._named(job)} cannot be written ({error.strerror})") from None
        manifest = CheckpointManifest(job.position, files, tensors, mesh=dict(degrees(self._mesh)))
        path = commit(partial, manifest)
        delete_others(self._folder, self._config.keep, self._config.keep_every)
        return path

    def _agree(self, stage: tuple[int, str], outcome: Any) -> Any:
        """Return rank 0's outcome of a stage on every rank, or raise it if it is an error."""
        box = [(stage, outcome)]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return self._check_outcome(stage, *box[0])

    def _gather(self, stage: tuple[int, str], outcome: Any) -> list[Any]:
        """Return every rank's outcome of a stage on every rank; raise the first error among them."""
        outcomes = gather_from_all((stage, outcome), self._group)
        return [self._check_outcome(stage, *each) for each in outcomes]

    def _check_outcome(self, stage: tuple[int, str], received: tuple[int, str], outcome: Any) -> Any:
        """Return an outcome, or raise it if it is an error.

        An outcome of another stage means that a call failed on one rank only, and the ranks are out of step.
        Saving then ends as if it had been cut off.
        """
        if received != stage:
            local, remote = f"{stage[1]} of step {stage[0]}", f"{received[1]} of step {received[0]}"
            self.cut_off = (
                f"the save of step {stage[0]} was cut off: processes are out of step ({local} on this rank, "
                f"{remote} received)"
            )
            raise SaveError(self.cut_off)
        if isinstance(outcome, SaveError):
            raise outcome
        return outcome


def _attempt(work: Any) -> Any:
    """Return the result of the work, or the error that ended it: the other ranks wait for one of them."""
    try:
        return work()
    except SaveError as error:
        return error
    except Exception as error:
        return SaveError(f"{type(error).__name__}: {error}")


def _limits(shards: Iterable[TensorShard]) -> Tensor:
    """Return limits[shards, 2]: minimum and maximum of each shard, on its device; both NaN if the shard
    contains NaN, zeros for integers. One pass over the memory."""
    limits = [limit.float() for shard in shards for limit in _range(shard.values)]
    return torch.stack(limits).reshape(-1, 2) if limits else torch.zeros(0, 2)


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    if not values.is_floating_point():  # always finite
        return values.new_zeros(2, dtype=torch.float32).unbind()  # type: ignore[return-value]
    return (values.bfloat16() if values.itemsize == 1 else values).aminmax()  # float8 has no aminmax
