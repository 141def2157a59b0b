"""Compile times of this process by graph and stage, cache hits, and the recompile guard, which reports graphs
that are compiled after the first step and the dynamo guard that failed."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.config import CompileConfig


@dataclass(frozen=True)
class CompiledGraph:
    """One compiled graph and the seconds of each stage; for a cache hit, of the look-up.

    Args:
        function: the compiled function, with its file and line
        phase: "forward", which includes the backward of eager backends; "backward" if that was compiled later
        dynamo_s: reading Python and making guards
        autograd_s: AOT autograd, which traces forward and backward and partitions them
        inductor_s: inductor and the compilers that it calls; 0 for other backends
    """

    function: str
    phase: str
    dynamo_s: float
    autograd_s: float
    inductor_s: float

    @property
    def total_s(self) -> float:
        return self.dynamo_s + self.autograd_s + self.inductor_s


def compiled_graphs() -> list[CompiledGraph]:
    """Return the graphs of this process so far, in order: the last 64, which is what dynamo records."""
    # the record of a backward has the id of its compilation, but not its function
    names: dict[str, str] = {}
    return [_compiled_graph(metrics, names) for metrics in torch._dynamo.utils.get_compilation_metrics()]


def _compiled_graph(metrics: Any, names: dict[str, str]) -> CompiledGraph:
    if metrics.co_name:
        names[str(metrics.compile_id)] = (
            f"{metrics.co_name} ({Path(metrics.co_filename or '').name}:{metrics.co_firstlineno})"
        )
    name = names.get(str(metrics.compile_id), "")
    # The time of each stage includes the stages that it calls.
    dynamo_s, autograd_s, inductor_s = (
        (microseconds or 0) / 1e6
        for microseconds in (
            metrics.dynamo_cumulative_compile_time_us or metrics.duration_us,
            metrics.aot_autograd_cumulative_compile_time_us,
            metrics.inductor_cumulative_compile_time_us,
        )
    )
    # a backward that is compiled when it first runs: without dynamo
    if not metrics.dynamo_cumulative_compile_time_us:
        return CompiledGraph(name, "backward", 0.0, max(dynamo_s - inductor_s, 0.0), inductor_s)
    return CompiledGraph(
        name, "forward", dynamo_s - autograd_s, max(autograd_s - inductor_s, 0.0), inductor_s
    )


def describe_compiling() -> str:
    """Return one line on this process's compile time, by stage, and its cache hits; "" without graphs."""
    graphs = compiled_graphs()
    if not graphs:
        return ""
    stages = {
        "dynamo": sum(graph.dynamo_s for graph in graphs),
        "AOT autograd": sum(graph.autograd_s for graph in graphs),
        "inductor": sum(graph.inductor_s for graph in graphs),
    }
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items() if seconds)
    return f"compiling took {sum(stages.values()):.1f} s ({parts}){_describe_cache()}"


def _describe_cache() -> str:
    """Return how many inductor graphs came from the cache; "" if inductor compiled none."""
    counters = torch._dynamo.utils.counters["inductor"]
    hits, misses = counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]
    bypassed = counters["fxgraph_cache_bypass"]
    if not hits + misses + bypassed:
        return ""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return f"; compile cache {cache_dir()}: {hits} graphs loaded from it, {misses + bypassed} compiled"


class RecompileError(RuntimeError):
    """A graph was recompiled, and `parallel.compile.on_recompile` is error."""


class RecompileGuard:
    """Collects dynamo's recompile reports once armed; `new_messages` returns them."""

    def __init__(self, config: CompileConfig) -> None:
        self._action = config.on_recompile if config.enabled else "ignore"
        self._reports = BufferingHandler(sys.maxsize)
        self._graphs: int | None = None

    def arm(self) -> None:
        """Start collecting: the first step should have compiled everything."""
        if self._action == "ignore" or self._graphs is not None:
            return
        self._graphs = count_training_graphs()
        torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]
        log = torch._logging.getArtifactLogger("torch._dynamo.guards", "recompiles")  # type: ignore[attr-defined]
        log.handlers[:] = [self._reports]  # instead of printing on every rank
        log.propagate = False

    def new_messages(self) -> list[str]:
        """Return one sentence for each recompile since the last call.

        Raises RecompileError if `on_recompile` is error.
        """
        if self._graphs is None:
            return []
        reports = [describe_recompile(record.getMessage()) for record in self._reports.buffer]
        self._reports.flush()
        before, self._graphs = self._graphs, count_training_graphs()
        if self._graphs == before:  # those of an evaluation
            return []
        if not reports:  # TORCH_LOGS overrides set_logs
            reports = [
                f"recompiled {self._graphs - before} graphs; TORCH_LOGS hides the reason: add recompiles "
                "to it"
            ]
        if reports and self._action == "error":
            raise RecompileError(
                f"{reports[0]}. parallel.compile.on_recompile=error ends the run: use warn to continue"
            )
        return reports


def describe_recompile(message: str) -> str:
    """Return dynamo's recompile report as one sentence: the function and the guards that failed."""
    head, *guards = [line.strip() for line in message.splitlines() if line.strip()]
    function = re.sub(r"^Recompiling function (\S+) in (\S+)$", r"recompiled \1 (\2)", head)
    reasons = [re.sub(r"^- \d+/\d+: ", "", guard) for guard in guards if guard.startswith("- ")]
    return f"{function}: {'; '.join(reasons) or 'dynamo names no guard'}"


def count_compiled_graphs() -> int:
    """Return the number of graphs that dynamo has captured in this process; every recompile adds one."""
    # Not counters["frames"]: dynamo does not count frames with fullgraph=True.
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def count_training_graphs() -> int:
    """`count_compiled_graphs` without those of evaluations (`of_evaluation`)."""
    return count_compiled_graphs() - _evaluation_graphs


_evaluation_graphs = 0


@contextmanager
def of_evaluation() -> Iterator[None]:
    """Context manager whose graphs are no recompiles: a module with dropout has another one in eval mode."""
    global _evaluation_graphs
    before = count_training_graphs()
    try:
        yield
    finally:
        _evaluation_graphs += count_training_graphs() - before
