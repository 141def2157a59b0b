"""What a person sees of a sweep: a line for each run, and on a terminal a live one for the run at hand."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from meshwright.parallel.errors import one_line
from meshwright.tools.run_reader import Row, parse_row, read_tail, value_of
from meshwright.tools.sweep.preflight import PlannedRun
from meshwright.tools.sweep.runner import OUTPUT

TAIL_BYTES = 1 << 14  # of metrics.jsonl: a few rows
REASON_LETTERS = 240


class SweepScreen:
    """Lines on standard output, or on standard error where that is for JSON."""

    def __init__(self, runs: int, to_stderr: bool = False) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._runs = runs

    def line(self, words: str, style: str = "") -> None:
        """Print a line."""
        self._console.print(Text(words, style), soft_wrap=True)

    @contextmanager
    def run(self, number: int, planned: PlannedRun) -> Iterator[Callable[[], None]]:
        """A live line for the n-th run, from 0, and what keeps it up to date. Without a terminal one line
        tells of the start."""
        name, began_s = self.name(number, planned), time.monotonic()
        if not self._console.is_terminal:
            self.line(f"{name} started, its output is in {planned.folder / OUTPUT}")
        with self._console.status(Text(f"{name} starting")) as status:

            def watch() -> None:
                if self._console.is_terminal:
                    words = f"{name} {progress_words(planned)}, {time.monotonic() - began_s:.0f} s"
                    status.update(Text(words, overflow="ellipsis", no_wrap=True))

            yield watch

    def name(self, number: int, planned: PlannedRun) -> str:
        """Of the n-th run, before everything that is said of it."""
        return f"[{number + 1}/{self._runs}] {planned.cell.name}:"

    def ended(self, number: int, planned: PlannedRun, state: str, reason: str) -> None:
        """How a run has ended, or ended before."""
        words = f"{self.name(number, planned)} {state}, {progress_words(planned)}"
        if state in ("failed", "refused"):
            self.line(f"{words}: {one_line(reason, REASON_LETTERS)}", "red")
            if state == "failed":
                self.line(f"    {planned.folder / OUTPUT}")
            return
        self.line(f"{words} ({reason})" if reason else words, "green" if state == "finished" else "")


def progress_words(planned: PlannedRun) -> str:
    """Step, loss and rate of a run's last row."""
    row = last_row(planned.folder / "metrics.jsonl")
    total = 0 if planned.config.train.epochs else planned.config.train.steps
    words = [f"step {row.get('step', 0)}" + (f" of {total}" if total else "")]
    for key, form in (
        ("loss", "loss {:.4f}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
        ("peak_memory_gib", "{:.2f} GiB"),
    ):
        if (value := value_of(row, key)) is not None:
            words.append(form.format(value))
    return ", ".join(words)


def last_row(path: Path) -> Row:
    """The last whole row of a metrics.jsonl that may be growing; {} where there is none."""
    for line in reversed(read_tail(path, TAIL_BYTES).split(b"\n")[:-1]):
        if row := parse_row(line):
            return row
    return {}
