"""Two runs on the same data, one with something switched on: how far apart their losses are."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.tools.bench.gpu_shapes import EndToEnd, GpuShape
from meshwright.tools.bench.processes import make_environment, python_command, run_to_end
from meshwright.tools.bench.run import read_rows

WINDOW = 50  # steps whose losses are averaged: single batches differ more than the runs do


@dataclasses.dataclass(frozen=True)
class Curves:
    """A run, and the run beside it, for so many steps."""

    run: EndToEnd
    beside: EndToEnd
    steps: int

    @property
    def name(self) -> str:
        return f"losses of {self.steps} steps: {self.run.variant} beside none, {self.run.layers} layers"


def measure_curves(
    folder: Path, work: Curves, shape: GpuShape, keys: Sequence[str], threads: int, look: Callable[[], None]
) -> dict[str, Any]:
    """Both runs, one after the other. Raises BenchError if one fails."""
    losses = {}
    for name, run in (("run", work.run), ("beside", work.beside)):
        out = folder / name
        arguments = [
            *run.keys(shape),
            f"--train.steps={work.steps}",
            "--metrics.every=1",
            f"--run.threads={threads}",
            f"--run.dir={out}",
            *keys,
        ]
        run_to_end(
            [*python_command("train.main", 1, folder / f"{name}-logs"), *arguments],
            make_environment(threads, {}),
            folder / f"{name}.log",
            look,
        )
        losses[name] = [row["loss"] for row in read_rows(out / "metrics.jsonl")]
    return compare_losses(losses["run"], losses["beside"])


def compare_losses(run: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """Nats: the largest difference between the means of WINDOW steps, that of the last ones, and both ends of
    the curves."""
    differences = [abs(a - b) for a, b in zip(_means(run), _means(beside), strict=True)]
    return {
        "steps": len(run),
        "first": [run[0], beside[0]],
        "last_mean": [_means(run)[-1], _means(beside)[-1]],
        "largest_difference": max(differences),
        "last_difference": differences[-1],
        "largest_of_a_step": max(abs(a - b) for a, b in zip(run, beside, strict=True)),
    }


def _means(losses: Sequence[float]) -> list[float]:
    """Of WINDOW neighbours, or of all if they are fewer."""
    window = min(WINDOW, len(losses))
    return [statistics.fmean(losses[i : i + window]) for i in range(len(losses) - window + 1)]
