"""How far to trust predictions: the errors of predicted tokens per second, and of memory, by the kind of run
and of machine, from configs/hardware/errors.csv, which `python -m benchmarks.fit --write` writes."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from meshwright.parallel.planner.hardware import HARDWARE_FOLDER, Hardware

ERRORS_FILE = HARDWARE_FOLDER / "errors.csv"
CPU, ONE_GPU, ONE_NODE, SEVERAL_NODES = "CPU", "one GPU", "one node", "several nodes"
UNSEEN, UNSEEN_GPU, MEMORY = "clusters it has not seen", "GPUs it has not seen", "memory"


@dataclass(frozen=True)
class Accuracy:
    """Errors of the predictions for one kind of run or machine, predicted / measured - 1: the mean of the
    absolute ones, the lowest and the highest."""

    rows: str
    runs: int
    mean: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        worst = max(self.lowest, self.highest, key=abs)
        way = "" if self.rows == MEMORY else " too fast" if worst > 0 else " too slow"
        return f"{self.rows}: {self.mean:.0%} on average, {abs(worst):.0%}{way} at worst, {self.runs} runs"


@cache
def load_errors() -> dict[str, Accuracy]:
    """Return the errors by kind of run, and by name of machine kind."""
    _, *table = csv.reader(ERRORS_FILE.read_text(encoding="utf-8").splitlines())
    return {rows: Accuracy(rows, int(runs), *map(float, errors)) for rows, runs, *errors in table}


def kind_of_run(cores: int, gpus: int, per_node: int) -> str:
    """Return the kind of a run on so many GPUs, or on the cores of CPUs."""
    return CPU if cores else ONE_GPU if gpus == 1 else ONE_NODE if gpus <= per_node else SEVERAL_NODES


def speed_errors(hardware: Hardware, gpus: int, per_node: int) -> Sequence[Accuracy]:
    """Return the errors of such runs, by a data sheet those of its GPU or of unseen ones, and of clusters."""
    errors, kind = load_errors(), kind_of_run(hardware.cores, gpus, per_node)
    of_runs = errors.get(hardware.name, errors[UNSEEN_GPU]) if hardware.is_bound else errors[kind]
    return [of_runs] if kind in (CPU, ONE_GPU) else [of_runs, errors[UNSEEN]]


def trust(hardware: Hardware, gpus: int, per_node: int) -> Iterator[tuple[str, str]]:
    """Yield what stands beside every predicted speed: its errors, and of a machine of which only the data
    sheet is known that this gives a bound, and how much of it is expected."""
    yield "errors", "; ".join(map(str, speed_errors(hardware, gpus, per_node)))
    if hardware.is_bound:
        expected = f"{hardware.reached:.0%} of it is expected, as published runs on H100s reached"
        yield "from the data sheet", f"an upper bound; {expected}"
