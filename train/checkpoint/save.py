"""Asynchronous saves: state is copied to host memory while training waits, then a background thread on each
rank writes and commits it.

The threads agree over a separate process group: rank 0 prepares the folder, every rank writes and hashes its
file, and rank 0 commits. A checkpoint is committed only if all ranks succeed; otherwise nothing of it
remains.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.errors import one_line
from meshwright.parallel.machine_memory import free_host_bytes
from meshwright.parallel.mesh import gather_from_all
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
    code_versions,
    degrees,
    describe_tensor,
    local_shards,
    needed_bytes,
    random_state,
    tied_names,
    training_tensors,
    write_shard_file,
)
from meshwright.train.config import CheckpointConfig
from meshwright.train.errors import ConfigError, SaveError

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
    problem: str
    trial: bool


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
        group_timeout: timedelta | None = None,
        hooks: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """`host_bytes` returns this rank's share of the free host memory, by default all of it;
        `group_timeout`: of the collectives of a save; None: torch's default; `hooks`: returns the state of
        hooks (`hooks.state_of`), always of the same names, shapes and dtypes."""
        self._config, self._folder, self._texts = config, folder, dict(texts)
        self._texts_bytes = _MANIFEST_BYTES + sum(map(len, texts.values()))
        self._host_bytes = host_bytes
        self._model, self._optimizer, self._mesh, self._hooks = model, optimizer, mesh, hooks
        self._tied = tied_names(model)
        self._hook_state = {name: describe_tensor(tensor) for name, tensor in hooks().items()}
        # A group of its own: saves run beside training.
        self._group = dist.new_group(backend="gloo", timeout=group_timeout, group_desc="checkpoint")
        # Decided by the full model, so that all ranks agree: a rank may have only its random state to write.
        self._on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._enough_memory = False  # whether all ranks have had enough for the copies
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
        job = self._make_job(position)
        try:
            problem = self._allocate_copies(job.shards) or job.problem
        except RuntimeError as failed:  # of a collective
            self._finish(position.step, None, self._cut_off_after(position.step, failed), start_s)
            return
        arguments = self._copy(replace(job, problem=problem)), start_s, time.perf_counter() - start_s
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="checkpoint-saver", daemon=True
        )
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
            job = self._make_job(TrainPosition(step + 1), trial=True)
            problem = "" if self._on_cpu else self._allocate_copies(job.shards)
            self._write(replace(job, shards={}, problem=job.problem or problem))
        except SaveError as error:
            message = f"checkpoint.every={self._config.every}, but no checkpoint can be saved: {error}"
            if self._config.on_error == "stop":
                raise ConfigError(f"{message}. To train all the same, try checkpoint.on_error=warn") from None
            warn(f"warning: {message}")

    def _make_job(self, position: TrainPosition, trial: bool = False) -> _Job:
        """Return a job whose shards are not copied yet. A problem of this rank is part of it, because the
        others wait for this rank."""
        tensors, random, shards, problem = dict[str, Tensor](), random_state(), dict[str, TensorShard](), ""
        try:
            tensors = self._tensors()
            shards = local_shards(tensors, self._mesh)
            shards |= {name: TensorShard(state, (0,) * state.dim()) for name, state in random.items()}
        except SaveError as error:
            problem = str(error)
        described = {name: describe_tensor(tensor) for name, tensor in {**tensors, **random}.items()}
        needed = needed_bytes(tensors, random, dist.get_world_size()) + self._texts_bytes
        return _Job(position, shards, torch.zeros(0, 2), described, needed, problem, trial)

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that training changes. Raises SaveError."""
        hooks = self._hooks()
        described = {name: describe_tensor(tensor) for name, tensor in hooks.items()}
        if described != self._hook_state:
            raise SaveError("state() of a hook has other names, shapes or dtypes than at the start")
        return {**training_tensors(self._model, self._optimizer), **hooks}

    def _allocate_copies(self, shards: Mapping[str, TensorShard]) -> str:
        """Allocate memory for the copies and keep it for later saves. Returns why that is impossible, or "".
        On a CPU with too little memory, saves become synchronous instead."""
        if self._on_cpu and self._config.asynchronous:
            if not self._enough_memory:  # all report before any allocates
                fits = (
                    bool(shards)
                    and sum(shard.values.nbytes for shard in shards.values()) <= self._host_bytes()
                )
                self._enough_memory = all(gather_from_all(fits, self._group))
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

    def _copy(self, job: _Job) -> _Job:
        """Return the job with its limits, and with its shards in host memory, where training cannot change
        them; the shards themselves if training waits for the save and they are on a CPU."""
        if job.problem:
            return replace(job, shards={})
        # the state of hooks may be infinite, such as the best loss so far
        finite = (shard for name, shard in job.shards.items() if not name.startswith((RANDOM, STATE)))
        job = replace(job, limits=_limits(finite).cpu())
        if not self._asynchronous and self._on_cpu:
            return job
        copied = {
            name: TensorShard(self._copies[name].copy_(shard.values, non_blocking=True), shard.offsets)
            for name, shard in job.shards.items()
        }
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return replace(job, shards=copied)

    def _run(self, job: _Job, start_s: float, stall_s: float) -> None:
        path, error = None, ""
        try:
            path = self._write(job)
        except SaveError as failed:
            error = str(failed)
        except Exception as failed:  # the training loop gets it from `poll`
            error = self._cut_off_after(job.position.step, failed)
        self._finish(job.position.step, path, error, start_s, stall_s if self._asynchronous else None)

    def _finish(
        self, step: int, path: Path | None, error: str, start_s: float, stall_s: float | None = None
    ) -> None:
        """Report a result. `stall_s`: None if training has waited for all of the save."""
        self.failed, total_s = error, time.perf_counter() - start_s
        self._results.put(Saved(step, path, error, total_s if stall_s is None else stall_s, total_s))

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
            self._on_all_ranks(begin if main else None)
            parts = self._on_all_ranks(partial(self._write_part, folder, job))
            committed = self._on_all_ranks(partial(self._commit, folder, job, parts) if main else None)
            return Path(committed[0])
        except SaveError:
            if main:
                abandon(self._folder, step)
            raise

    def _write_part(self, folder: Path, job: _Job) -> _Part:
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
            file = write_shard_file(folder / name, job.shards)
        except OSError as error:
            raise SaveError(f"{self._named(job) / name} cannot be written ({error.strerror})") from None
        return name, file, {key: tensor for key, tensor in job.tensors.items() if key.startswith("random.")}

    def _named(self, job: _Job) -> Path:
        """Return the name that a message gives the checkpoint; its partial folder is gone by then."""
        return self._folder / step_name(job.position.step)

    def _commit(self, folder: Path, job: _Job, parts: Sequence[_Part]) -> Path:
        if job.trial:
            abandon(self._folder, job.position.step)
            return folder
        tensors = {name: tensor for name, tensor in job.tensors.items() if not name.startswith("random.")}
        files = {name: file for name, file, _ in parts}
        for _, _, random in parts:
            tensors |= random
        try:
            for name, text in self._texts.items():
                write_synced(folder / name, text)
                files[name] = hash_file(folder / name)
        except OSError as error:
            raise SaveError(f"{self._named(job)} cannot be written ({error.strerror})") from None
        manifest = CheckpointManifest(
            job.position, files, tensors, dict(degrees(self._mesh)), code_versions(), self._tied
        )
        path = commit(folder, manifest)
        delete_others(self._folder, self._config.keep, self._config.keep_every)
        return path

    def _on_all_ranks(self, work: Callable[[], Any] | None) -> list[Any]:
        """Call each rank's `work`, if it has any, and return the results of all ranks. If it fails on one
        rank, all raise the first SaveError: the others wait for its result."""
        outcome: Any = None
        try:
            outcome = work() if work else None
        except SaveError as error:
            outcome = error
        except Exception as error:
            outcome = SaveError(f"{type(error).__name__}: {error}")
        outcomes = gather_from_all(outcome, self._group)
        for each in outcomes:
            if isinstance(each, SaveError):
                raise each
        return outcomes


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
