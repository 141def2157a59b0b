"""Terminal output of a sweep: a line for each run and, on a terminal, a live line for the current one."""

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

TAIL_BYTES = 1 << 14  # of metrics.jsonl: enough for a few rows
REASON_LETTERS = 240


class SweepScreen:
    """Prints lines to standard output, or to standard error if standard output is for JSON."""

    def __init__(self, runs: int, to_stderr: bool = False) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._runs = runs

    def line(self, text: str, style: str = "") -> None:
        """Print a line."""
        self._console.print(Text(text, style), soft_wrap=True)

    @contextmanager
    def run(self, number: int, planned: PlannedRun) -> Iterator[Callable[[], None]]:
        """Show a live line for run `number` (from 0) and yield the function that updates it. Without a
        terminal, print one line at the start instead."""
        name, began_s = self.name(number, planned), time.monotonic()
        if not self._console.is_terminal:
            self.line(f"{name} started, output: {planned.folder / OUTPUT}")
        with self._console.status(Text(f"{name} starting")) as status:

            def watch() -> None:
                if self._console.is_terminal:
                    text = f"{name} {describe_progress(planned)}, {time.monotonic() - began_s:.0f} s"
                    status.update(Text(text, overflow="ellipsis", no_wrap=True))

            yield watch

    def name(self, number: int, planned: PlannedRun) -> str:
        """Return the prefix of every line about a run."""
        return f"[{number + 1}/{self._runs}] {planned.cell.name}:"

    def ended(self, number: int, planned: PlannedRun, state: str, reason: str) -> None:
        """Print the state in which a run ended, now or earlier."""
        text = f"{self.name(number, planned)} {state}, {describe_progress(planned)}"
        if state in ("failed", "refused"):
            self.line(f"{text}: {one_line(reason, REASON_LETTERS)}", "red")
            if state == "failed":
                self.line(f"    {planned.folder / OUTPUT}")
            return
        self.line(f"{text} ({reason})" if reason else text, "green" if state == "finished" else "")


def describe_progress(planned: PlannedRun) -> str:
    """Describe a run's last row: step, loss, throughput and memory."""
    row = last_row(planned.folder / "metrics.jsonl")
    total = 0 if planned.config.train.epochs else planned.config.train.steps
    parts = [f"step {row.get('step', 0)}" + (f" of {total}" if total else "")]
    for key, form in (
        ("loss", "loss {:.4f}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
        ("peak_memory_gib", "{:.2f} GiB"),
    ):
        if (value := value_of(row, key)) is not None:
            parts.append(form.format(value))
    return ", ".join(parts)


def last_row(path: Path) -> Row:
    """Return the last complete row of a metrics.jsonl that may be growing; {} if there is none."""
    for line in reversed(read_tail(path, TAIL_BYTES).split(b"\n")[:-1]):
        if row := parse_row(line):
            return row
    return {}
