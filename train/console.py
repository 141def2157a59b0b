"""Screen output: log lines of rank 0, and on a terminal a progress bar."""

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.train.hooks import Hook, Row, StepDone

if TYPE_CHECKING:
    from meshwright.train.checkpoint.manifest import TrainPosition


class Console:
    """Prints plain lines to standard output, on a terminal above a progress bar; only on rank 0."""

    def __init__(self, is_main: bool) -> None:
        self._is_main = is_main
        self._progress: Progress | None = None
        self._total = 0

    def print(self, text: str) -> None:
        """Print one or more lines."""
        if not self._is_main:
            return
        try:
            if self._progress is not None:
                self._progress.console.print(text, markup=False, highlight=False)
            else:
                print(text, flush=True)
        except OSError:  # the terminal or the pipe's reader has exited: training continues without output
            self._disable()

    def print_lines(self, texts: Iterable[str]) -> None:
        """Print each text."""
        for text in texts:
            self.print(text)

    def start_progress(self, done: int, total: int) -> None:
        """Show the progress bar if standard output is a terminal."""
        self._total = total
        if self._is_main and sys.stdout.isatty():
            columns = (
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=16),
                TextColumn("{task.description}"),
                TimeRemainingColumn(elapsed_when_finished=True),
            )
            self._progress = Progress(*columns, console=RichConsole(highlight=False))
            self._progress.add_task("first step: compiling", completed=done, total=total)
            self._progress.start()

    def step_done(self, step: int) -> None:
        """Advance the progress bar to `step`."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def report(self, row: Row) -> None:
        """Show a row of metrics: in the progress bar, or as a separate line."""
        text = _describe(row)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=text)
        if self._progress is None or "eval_loss" in row:
            self.print(f"step {row['step']}/{self._total}  {text}")

    def close(self) -> None:
        """Stop the progress bar."""
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.stop()
            self._progress = None

    def _disable(self) -> None:
        """Stop printing; redirect standard output to /dev/null, because Python's flush at exit would fail."""
        self._is_main = False
        self.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Screen(Hook):
    """The progress of a run on the console."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console, self._total_steps = console, total_steps

    def start(self, position: "TrainPosition") -> None:
        self._console.start_progress(position.step, self._total_steps)

    def after_step(self, done: StepDone) -> None:
        self._console.step_done(done.step)

    def on_report(self, row: Row) -> None:
        self._console.report(row)

    def close(self) -> None:
        self._console.close()


def _describe(row: Row) -> str:
    parts = [f"loss {row['loss']:.4f}"] if "loss" in row else []
    if "eval_loss" in row:
        parts.append(f"eval loss {row['eval_loss']:.4f}")
    if "tokens_per_s" in row:
        rate, trained = (f"{row[name]:,.0f}" for name in ("tokens_per_s", "trained_tokens_per_s"))
        parts.append(f"{rate} tokens/s" if trained == rate else f"{rate} tokens/s ({trained} trained)")
        if "mfu" in row:
            parts.append(f"MFU {row['mfu']:.1%} (causal {row['mfu_causal']:.1%})")
        parts.append(f"{row['peak_memory_gib']:.2f} GiB")
        if row["recompiles"]:
            parts.append(f"{row['recompiles']} recompiles")
    return "  ".join(parts)
