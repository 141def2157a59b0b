"""How wrong predictions were: errors of predicted tokens per second, and of memory, by the kind of run, from
configs/hardware/errors.csv, which `python -m benchmarks.fit --write` writes."""

import csv
from dataclasses import dataclass
from functools import cache

from meshwright.parallel.planner.hardware import HARDWARE_FOLDER, Hardware

ERRORS_FILE = HARDWARE_FOLDER / "errors.csv"
CPU, ONE_GPU, ONE_NODE, SEVERAL_NODES = "CPU", "one GPU", "one node", "several nodes"
UNSEEN, MEMORY = "clusters it has not seen", "memory"


@dataclass(frozen=True)
class Accuracy:
    """Errors of the predictions for one kind of run: predicted / measured - 1.

    Args:
        rows: the kind of run
        runs: their number
        mean: of the absolute errors
        lowest, highest: error
    """

    rows: str
    runs: int
    mean: float
    lowest: float
    highest: float

    def describe(self) -> str:
        """Return the errors as text."""
        worst = max(abs(self.lowest), abs(self.highest))
        return f"{self.rows}: {self.mean:.0%} on average, {worst:.0%} at worst, {self.runs} runs"


@cache
def load_errors() -> dict[str, Accuracy]:
    """Return the errors by kind of run."""
    with ERRORS_FILE.open(encoding="utf-8", newline="") as file:
        table = [(row.pop("rows"), int(row.pop("runs")), row) for row in csv.DictReader(file)]
    return {rows: Accuracy(rows, runs, **{k: float(v) for k, v in row.items()}) for rows, runs, row in table}


def kind_of_run(cores: int, gpus: int, per_node: int) -> str:
    """Return the kind of a run on so many GPUs, or on the cores of CPUs."""
    return CPU if cores else ONE_GPU if gpus == 1 else ONE_NODE if gpus <= per_node else SEVERAL_NODES


@dataclass(frozen=True)
class SpeedErrors:
    """The errors of tokens per second that a prediction carries, as text, and the lowest and the highest."""

    text: str
    lowest: float
    highest: float


def speed_errors(hardware: Hardware, gpus: int, per_node: int) -> SpeedErrors:
    """Return the errors of predictions of such runs. Clusters of which no run was seen have larger ones."""
    errors = load_errors()
    same = errors[kind_of_run(hardware.cores, gpus, per_node)]
    if hardware.cores or gpus == 1:
        return SpeedErrors(same.describe(), same.lowest, same.highest)
    unseen = errors[UNSEEN]
    text = f"{same.describe()}; {UNSEEN}: up to {unseen.highest:.0%} too fast"
    return SpeedErrors(text, min(same.lowest, unseen.lowest), max(same.highest, unseen.highest))


def describe_bound(hardware: Hardware) -> str:
    """Return what the expected figures of a machine are, of which only the data sheet is known; "" of one
    that was measured."""
    return hardware.is_bound * (
        f"{hardware.reached:.0%} of the bound by the data sheet, as published runs on such machines"
    )
