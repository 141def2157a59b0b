"""The process: its place among the others, its device, threads, signals and end."""

import ctypes
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from parallel.plan import PlanError


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and how long.

    Args:
        dir: folder of the run; the same command in the same folder goes on where it stopped. null: runs/ plus the
            config's name
        seed: seed of the initial weights and of the order of the data
        device: auto takes the GPU where every local process has one, else the CPU; or cpu, or cuda
        threads: CPU threads per process; 0 shares the cores among the local processes
        max_hours: stop after this many hours, saving first; 0 is never
        grace_s: seconds a stop may take once asked for, before the process ends without saving (torchrun allows 30
            after a signal to itself, whatever is said here)
    """

    dir: str | None = None
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    max_hours: float = 0.0
    grace_s: float = 120.0

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"run.device={self.device} must be auto, cpu or cuda")
        ranges = {"seed": (0, 2**63 - 1), "threads": (0, 4096), "max_hours": (0, 1e6), "grace_s": (1, 1e6)}
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"run.{name}={getattr(self, name)} must lie between {least} and {most}")


@dataclass(frozen=True)
class Place:
    """This process among the others, as torchrun tells it; alone without torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    under_torchrun: bool

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_place() -> Place:
    """Read torchrun's environment variables, here and nowhere else."""
    env = os.environ
    return Place(
        rank=int(env.get("RANK", 0)),
        world_size=int(env.get("WORLD_SIZE", 1)),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
        under_torchrun="TORCHELASTIC_RUN_ID" in env,
    )


def choose_device(config: RunConfig, place: Place) -> tuple[torch.device, str]:
    """The device of this process, and a sentence that says why. Raises PlanError where cuda is asked for in vain."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= place.local_world_size
    if config.device == "cuda" and not enough:
        raise PlanError(f"run.device=cuda needs {place.local_world_size} GPUs for as many local processes, here are "
                        f"{gpus}: start {max(gpus, 1)} per node, or use --run.device=cpu")  # fmt: skip
    if config.device == "cpu" or not enough:
        why = f"{gpus} GPUs for {place.local_world_size} local processes" if gpus else "no GPU"
        return torch.device("cpu"), f"CPU ({'asked for' if config.device == 'cpu' else why})"
    device = torch.device("cuda", place.local_rank)
    return device, torch.cuda.get_device_name(device)


def device_memory_bytes(device: torch.device, place: Place) -> int:
    """Memory that one process can have: a whole GPU, or its share of what the node has free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = "/proc/meminfo"
    if os.path.exists(meminfo):  # counts what the page cache can give back
        with open(meminfo, encoding="ascii") as lines:
            free = next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), free)
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():  # a container's own limit
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free // place.local_world_size


def start_process(config: RunConfig, place: Place, device: torch.device) -> None:
    """Set threads and device, and join the process group (alone too: the same code runs everywhere)."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:  # it warns of a CUDA toolkit without a GPU, which is no fault here
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.threads or max(1, cores // place.local_world_size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if place.under_torchrun or place.world_size > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    torch.manual_seed(config.seed)


def return_free_memory() -> None:
    """Give memory that Python and C++ have freed back to the system, where the C library can (glibc).

    Compiling frees over 100 MiB in small pieces that glibc would keep, besides what training then takes.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class Stop:
    """Whether to stop, agreed by all ranks at the same step, without waiting for the device.

    Any rank may ask (a signal, the time limit). At the end of each step every rank starts a tiny all-reduce over
    gloo, on the host, and reads the one it started a step before: so all stop after the same step, and the GPU's
    queue is never drained. A second signal ends the process at once; so does a stop that outlasts `grace_s` (as soon
    as Python runs again: a signal is not heard inside a collective that waits for a dead rank).
    """

    def __init__(self, config: RunConfig) -> None:
        self.reason: str | None = None
        self._deadline = time.monotonic() + config.max_hours * 3600 if config.max_hours else None
        self._grace_s = config.grace_s
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask(f"signal {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop soon."""
        self.reason = self.reason or reason

    def agreed(self) -> bool:
        """Called by every rank once a step: True on all of them at the same step."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.ask("run.max_hours")
        if self._group is None:
            return self.reason is not None
        answer = False
        if self._pending is not None:
            work, asked = self._pending
            work.wait()
            answer = bool(asked.item())
        asked = torch.tensor([int(self.reason is not None)], dtype=torch.int32)
        work = dist.all_reduce(asked, group=self._group, async_op=True)
        self._pending = (work, asked)
        if answer:
            work.wait()
            self.ask("another rank was asked to")
        return answer


def exit_process(place: Place, code: int, error: BaseException | None = None) -> None:
    """End the process with `code`; under torchrun, hand it `error` so that its report carries the one message."""
    if place.under_torchrun and error is not None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
