"""The stacks of this process's threads: short for a message, complete for a file."""

import os
import platform
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import torch
import torch.distributed as dist

from meshwright.train.fault_tolerance.hang_diagnosis import Where, as_ranges

PACKAGE = Path(__file__).parents[2]
ROOT = PACKAGE.parent
TORCH = Path(torch.__file__).parent
# A wait for a collective outside the functions of torch.distributed: in our code and in compiled graphs.
WAIT = re.compile(r"\.wait\(|\bwait_tensor\b|\b_c10d_functional\b")
# PyTorch's name; its tool torchfrtrace searches for it by --prefix
TRACE_FILE = "nccl_trace_rank_"


def main_thread_calls() -> list[FrameSummary]:
    """Return the main thread's frames, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    walked = traceback.walk_stack(frame) if frame else ()
    # not StackSummary.extract, which accesses every source file, even on a network folder that hangs
    return [
        FrameSummary(f.f_code.co_filename, line, f.f_code.co_name, lookup_line=False) for f, line in walked
    ]


def find_where(calls: Sequence[FrameSummary]) -> Where:
    """Return where a stack (innermost call first) is in our code, and in which collective, if any."""
    ours = [call for call in calls if _is_ours(call)]
    inner = calls[: calls.index(ours[0])] if ours else calls
    return Where(
        place=_show(ours[0]) if ours else "",
        waits_in=_collective(inner) or ("wait" if calls and WAIT.search(calls[0].line or "") else ""),
        inside=_show(inner[0]) if inner else "",
        path=tuple(_show(call) for call in reversed(ours) if call.name != "<module>"),
    )


def write_stacks(folder: Path, rank: int, world_size: int) -> None:
    """Write the stacks of this rank's threads, except the calling one, into a folder: the main thread's
    first, innermost call last. Raises OSError."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, caller = threading.main_thread().ident, threading.get_ident()
    process = f"process {os.getpid()} on {platform.node()}"
    parts = [f"rank {rank} of {world_size}, {process}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n"]
    for number, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if number != caller:
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"\nthread {names.get(number, number)} (innermost call last)\n{stack}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank:05d}.txt").write_text("".join(parts), encoding="utf-8")


def keeps_flight_record() -> bool:
    """Return whether PyTorch's flight recorder keeps a record for torchfrtrace: NCCL's collectives."""
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def write_flight_record(folder: Path, rank: int) -> None:
    """Write this rank's last collectives and the state of each, in the format of PyTorch's tool torchfrtrace.

    TORCH_FR_BUFFER_SIZE (formerly TORCH_NCCL_TRACE_BUFFER_SIZE) sets how many are kept; 0 disables the
    record. Raises OSError.
    """
    from torch._C import _distributed_c10d as c10d

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{TRACE_FILE}{rank}").write_bytes(c10d._dump_nccl_trace())  # type: ignore[attr-defined]


def count_collectives() -> tuple[tuple[str, int], ...]:
    """Return the number of collectives started in each process group of this rank, by a name that is the same
    on all its members."""
    started, same = list[tuple[str, int]](), Counter[str]()
    for group in list(dist.distributed_c10d._world.pg_map):
        ranks = dist.get_process_group_ranks(group)
        name = f"{group.group_desc} of {'rank' if len(ranks) == 1 else 'ranks'} {as_ranges(ranks)}"
        same[name] += 1
        number = f", number {same[name]}" if same[name] > 1 else ""
        started.append((name + number, group._get_sequence_number_for_group()))  # type: ignore[attr-defined]
    return tuple(started)


def _is_ours(call: FrameSummary) -> bool:
    """Return whether a call is in the package or its checkout, but not in an environment inside it."""
    path = Path(call.filename)
    in_checkout = path.is_relative_to(ROOT) and not {"site-packages", "dist-packages"} & set(path.parts)
    return path.is_relative_to(PACKAGE) or in_checkout


def _show(call: FrameSummary) -> str:
    """Return "file:line function", with the path in the package, the checkout or the folder that contains
    torch; otherwise with the last two parts of the path."""
    path, folders = Path(call.filename), (PACKAGE, ROOT) if _is_ours(call) else (TORCH.parent,)
    inside = (path.relative_to(folder) for folder in folders if path.is_relative_to(folder))
    shown = next(inside, Path(*path.parts[-2:]))
    return f"{shown}:{call.lineno} {call.name}"


def _collective(inner: Sequence[FrameSummary]) -> str:
    """Return the function of torch.distributed that our code (or autograd) called and that still runs."""
    folder = TORCH / "distributed"
    calls = [call for call in inner if Path(call.filename).is_relative_to(folder)]
    named = [call.name for call in calls if call.filename.endswith("distributed_c10d.py")]
    if named:
        return named[-1]
    waiting = ("fsdp", "_composable", "tensor", "_functional_collectives.py", "_symmetric_memory")
    if calls and Path(calls[0].filename).relative_to(folder).parts[0] in waiting:
        return calls[0].name
    return ""
