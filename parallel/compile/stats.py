"""What compiling has cost this process (by graph, by stage, and what the cache had), and the recompile guard:
whatever is compiled after the first step is said, with the guard that failed."""

import re
import sys
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.config import CompileConfig


@dataclass(frozen=True)
class CompiledGraph:
    """One graph, and the seconds of each stage; where the cache had it, what finding it took.

    Args:
        function: what was compiled, with its file and line
        phase: "forward", in which eager backends count the backward too; "backward" where that was compiled
            later
        dynamo_s: reading Python and making guards
        autograd_s: AOT autograd, which traces forward and backward and splits them
        inductor_s: inductor with the compilers that it calls; 0 of other backends
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
    """The graphs of this process so far, in order: the last 64, of which dynamo keeps notes."""
    # a backward's note does not tell its function, but the compilation that it belongs to
    names: dict[str, str] = {}
    return [_compiled_graph(note, names) for note in torch._dynamo.utils.get_compilation_metrics()]


def _compiled_graph(note: Any, names: dict[str, str]) -> CompiledGraph:
    if note.co_name:
        names[str(note.compile_id)] = (
            f"{note.co_name} ({Path(note.co_filename or '').name}:{note.co_firstlineno})"
        )
    name = names.get(str(note.compile_id), "")
    # Each stage's time contains those of the stages that it calls.
    dynamo_s, autograd_s, inductor_s = (
        (microseconds or 0) / 1e6
        for microseconds in (
            note.dynamo_cumulative_compile_time_us or note.duration_us,
            note.aot_autograd_cumulative_compile_time_us,
            note.inductor_cumulative_compile_time_us,
        )
    )
    # a backward that is compiled in the backward: dynamo has no part in it
    if not note.dynamo_cumulative_compile_time_us:
        return CompiledGraph(name, "backward", 0.0, max(dynamo_s - inductor_s, 0.0), inductor_s)
    return CompiledGraph(
        name, "forward", dynamo_s - autograd_s, max(autograd_s - inductor_s, 0.0), inductor_s
    )


def describe_compiling() -> str:
    """One line on the compiled graphs of this process so far: what they took, and where they come from; "" if
    there are none."""
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
    """Graphs of inductor: from the cache, or compiled anew."""
    counters = torch._dynamo.utils.counters["inductor"]
    hits, misses = counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]
    bypassed = counters["fxgraph_cache_bypass"]
    if not hits + misses + bypassed:
        return ""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return f"; compile cache {cache_dir()}: {hits} graphs found there, {misses + bypassed} compiled anew"


class RecompileError(RuntimeError):
    """Something was compiled again, and `parallel.compile.on_recompile` is error."""


class RecompileGuard:
    """Listens, once armed, to what dynamo says of recompiling; `news` hands it on."""

    def __init__(self, config: CompileConfig) -> None:
        self._action = config.on_recompile if config.enabled else "ignore"
        self._heard = BufferingHandler(sys.maxsize)
        self._graphs: int | None = None

    def arm(self) -> None:
        """Start listening: what is compiled from now on should have been compiled in the first step."""
        if self._action == "ignore" or self._graphs is not None:
            return
        self._graphs = count_compiled_graphs()
        torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]
        log = torch._logging.getArtifactLogger("torch._dynamo.guards", "recompiles")  # type: ignore[attr-defined]
        log.handlers[:] = [self._heard]  # instead of printing on every rank
        log.propagate = False

    def news(self) -> list[str]:
        """What has been recompiled since the last call, one sentence each. Raises RecompileError under
        `error`."""
        if self._graphs is None:
            return []
        heard = [in_words(record.getMessage()) for record in self._heard.buffer]
        self._heard.flush()
        before, self._graphs = self._graphs, count_compiled_graphs()
        if self._graphs > before and not heard:  # set_logs gives way to TORCH_LOGS
            heard = [
                f"recompiled {self._graphs - before} graphs; TORCH_LOGS keeps the reason back, add "
                "recompiles to it"
            ]
        if heard and self._action == "error":
            raise RecompileError(
                f"{heard[0]}. parallel.compile.on_recompile=error ends the run here; warn would go on"
            )
        return heard


def in_words(message: str) -> str:
    """dynamo's report of a recompilation as one sentence: what was compiled again, and why."""
    head, *guards = [line.strip() for line in message.splitlines() if line.strip()]
    what = re.sub(r"^Recompiling function (\S+) in (\S+)$", r"recompiled \1 (\2)", head)
    reasons = [re.sub(r"^- \d+/\d+: ", "", guard) for guard in guards if guard.startswith("- ")]
    return f"{what}: {'; '.join(reasons) or 'dynamo names no guard'}"


def count_compiled_graphs() -> int:
    """How many graphs dynamo has captured in this process; every recompile adds one."""
    # Not counters["frames"]: with fullgraph=True dynamo does not count those.
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
