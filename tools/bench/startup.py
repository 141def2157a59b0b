"""Where the seconds go between a command and the end of its first training step."""

import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.tools.bench.processes import descendant_age_s
from meshwright.tools.bench.run import Setup, measure_run_in

# a run says its versions once its plan is made
FIRST_LINE = re.compile(rb"^meshwright \d.*, torch ", re.MULTILINE)


@dataclass(frozen=True)
class Startup:
    """Seconds of the parts, one after the other, and `total_s` of all; None where the system does not tell.

    Args:
        launcher_s: until the first worker's process exists; 0 where there is no launcher
        imports_s: until the run's first line: imports, config, plan, process group
        setup_s: until the first step begins: data, model, weights
        compile_s: what the first step takes beyond a later one: compiling, or reading the cache
        step_s: a later step (median)
    """

    launcher_s: float | None
    imports_s: float | None
    setup_s: float | None
    compile_s: float
    step_s: float
    total_s: float


@dataclass
class Marks:
    """Moments seen from outside while a run starts, on the clock of time.perf_counter; 0 is not yet."""

    log: Path
    worker_at: float = 0.0
    spoke_at: float = 0.0

    def look(self) -> None:
        """Called all the time while the run runs."""
        if (
            not self.worker_at
            and (age_s := descendant_age_s(b"train.main", b"torch.distributed.run")) is not None
        ):
            self.worker_at = time.perf_counter() - age_s
        if not self.spoke_at and self.log.exists() and FIRST_LINE.search(self.log.read_bytes()):
            self.spoke_at = time.perf_counter()


def measure_startup(setup: Setup, cache: dict[str, str]) -> Startup:
    """Run it and split its start. Raises BenchError if it fails."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        marks, began_at = Marks(folder / "log"), time.perf_counter()
        figures = measure_run_in(folder, setup, cache, marks.look)
    first_s, *later = figures.step_times_s
    worker_s, spoke_s = (at - began_at if at else None for at in (marks.worker_at, marks.spoke_at))
    return split_start(figures.startup_s, worker_s, spoke_s, first_s, statistics.median(later or [0.0]))


def split_start(
    total_s: float, worker_s: float | None, spoke_s: float | None, first_s: float, later_s: float
) -> Startup:
    """The parts, from seconds since the command until the worker existed, until it spoke, and of the first
    and a later step."""
    return Startup(
        launcher_s=None if worker_s is None else max(0.0, worker_s),
        imports_s=None if worker_s is None or spoke_s is None else spoke_s - max(0.0, worker_s),
        setup_s=None if spoke_s is None else total_s - first_s - spoke_s,
        compile_s=first_s - later_s,
        step_s=later_s,
        total_s=total_s,
    )
