"""Where the seconds of a training step go, by class of kernel, from a profiler's trace.

On a GPU the kernels that ran on it; on a CPU its operators, each without the time of those that it called.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.tools.cli import format_table
from meshwright.tools.processes import BenchError

# By name, the first that matches; what matches none moves memory: norms, SwiGLU, RoPE, losses, casts, copies.
CLASSES = (
    ("communication", r"nccl|gloo|c10d|all_gather_into|reduce_scatter_tensor|all_reduce"),
    ("optimizer", r"adam|multi_tensor_apply|foreach|linalg_vector_norm|lpnorm|^_update$"),
    ("attention", r"flash|fmha|sdpa|attention|flex"),
    (
        "GEMM",
        r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|triton_tem|triton_mm|::(mm|addmm|bmm|linear|mkldnn_\w*linear)$|_mm$",
    ),
)
MEMORY = "memory-bound"
NAMES = (*(name for name, _ in CLASSES), MEMORY)
GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
TOP = 20  # kernels that are named


@dataclass(frozen=True)
class KernelEvent:
    """One kernel or operator: seconds from the trace's start, and the thread or stream it ran on."""

    name: str
    track: tuple[Any, Any]
    start_s: float
    end_s: float


def table_of(trace: Path, steps: int) -> dict[str, Any]:
    """Seconds of a step by class, `idle_s` in which nothing ran, `beside_s` in which two ran at once (they
    count twice, so that classes + idle - beside = step), and the kernels that take most. Raises BenchError
    for a trace without any."""
    events = read_trace(trace)
    if not events:
        raise BenchError(f"{trace.name} has no kernels and no operators")
    alone = own_seconds(events)
    busy_s, window_s = covered(events), max(e.end_s for e in events) - min(e.start_s for e in events)
    seconds, calls = Counter[str](), Counter[str]()
    for event, own_s in alone:
        seconds[event.name] += own_s  # type: ignore[assignment]
        calls[event.name] += 1
    by_class = {
        name: sum(s for kernel, s in seconds.items() if classify(kernel) == name) / steps for name in NAMES
    }
    top = [
        {"class": classify(name), "name": name, "s": s / steps, "calls": calls[name] / steps}
        for name, s in seconds.most_common(TOP)
    ]
    return {
        "steps": steps,
        "step_s": window_s / steps,
        "by_class_s": by_class,
        "idle_s": (window_s - busy_s) / steps,
        "beside_s": (sum(seconds.values()) - busy_s) / steps,
        "top": top,
    }


def read_trace(path: Path) -> list[KernelEvent]:
    """What ran on the GPU, or, where nothing did, operators on the CPU; of a Chrome trace, .json or .json.gz
    (microseconds)."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [row for row in json.loads(content)["traceEvents"] if row.get("ph") == "X" and row.get("dur")]
    chosen = [row for row in rows if row.get("cat") in GPU_KINDS] or [
        row for row in rows if row.get("cat") == "cpu_op"
    ]
    return [
        KernelEvent(row["name"], (row["pid"], row["tid"]), row["ts"] / 1e6, (row["ts"] + row["dur"]) / 1e6)
        for row in chosen
    ]


def classify(name: str) -> str:
    """The class of a kernel or operator."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), MEMORY)


def own_seconds(events: Sequence[KernelEvent]) -> list[tuple[KernelEvent, float]]:
    """Every event with its seconds less those of the events within it on its track."""
    own = [e.end_s - e.start_s for e in events]
    order = sorted(range(len(events)), key=lambda i: (events[i].track, events[i].start_s, -events[i].end_s))
    around: list[int] = []
    for i in order:
        event = events[i]
        while around and (
            events[around[-1]].track != event.track or events[around[-1]].end_s <= event.start_s
        ):
            around.pop()
        if around and event.end_s <= events[around[-1]].end_s:
            own[around[-1]] -= event.end_s - event.start_s
        around.append(i)
    return list(zip(events, own, strict=True))


def covered(events: Iterable[KernelEvent]) -> float:
    """Seconds in which at least one event ran."""
    total_s = end_s = 0.0
    for event in sorted(events, key=lambda e: e.start_s):
        total_s += max(0.0, event.end_s - max(event.start_s, end_s))
        end_s = max(end_s, event.end_s)
    return total_s


def table_text(table: dict[str, Any]) -> str:
    """Both tables for people."""
    step_s = table["step_s"]
    rows = [
        *table["by_class_s"].items(),
        ("idle", table["idle_s"]),
        ("two at once", -table["beside_s"]),
        ("step", step_s),
    ]
    cells = [(name, f"{1e3 * s:,.2f}", f"{s / step_s:.1%}") for name, s in rows]
    top = [
        (f"{1e3 * row['s']:,.2f}", f"{row['calls']:.0f}", row["class"], row["name"][:70])
        for row in table["top"]
    ]
    kernels = format_table(("ms a step", "calls", "class", "kernel"), top)
    return f"{format_table(('class', 'ms a step', 'share'), cells)}\n\n{kernels}"
