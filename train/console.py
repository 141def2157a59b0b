"""Screen output: log lines of rank 0, and on a terminal a progress bar."""

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.parallel.errors import fold
from meshwright.parallel.plan.schema import Plan
from meshwright.train.hooks import Hook, Row, StepDone

if TYPE_CHECKING:
    from meshwright.train.checkpoint.manifest import TrainPosition


class Console:
    """Prints plain lines to standard output, on a terminal above a progress bar; only on rank 0."""

    def __init__(self, is_main: bool) -> None:
        self._is_main = is_main
        self._progress: Progress | None = None
        self._total, self._memory, self._peak = 0, "", ""

    def print(self, text: str) -> None:
        """Print one or more lines."""
        if not self._is_main:
            return
        try:
            if self._progress is not None:
                # soft: the terminal breaks long lines, so that a path is copied as one word
                self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)
        except OSError:  # the terminal or the pipe's reader has exited: training continues without output
            self._disable()

    def print_lines(self, texts: Iterable[str]) -> None:
        """Print each text."""
        for text in texts:
            self.print(text)

    def start_progress(self, done: int, total: int, compiling: bool, memory: str) -> None:
        """Show the progress bar if standard output is a terminal. `compiling`: the first step compiles;
        `memory`: what the memory of a report is the peak of."""
        self._total, self._memory = total, memory
        if self._is_main and sys.stdout.isatty():
            columns = (
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=16),
                TextColumn("{task.description}"),
                TimeRemainingColumn(elapsed_when_finished=True),
            )
            self._progress = Progress(*columns, console=RichConsole(highlight=False))
            first = "first step: compiling" if compiling else "first step"
            self._progress.add_task(first, completed=done, total=total)
            self._progress.start()

    def step_done(self, step: int) -> None:
        """Advance the progress bar to `step`; it shows the memory of the last report."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, description=self._peak)

    def report(self, row: Row) -> None:
        """Show a row of metrics as a line; on a terminal the progress bar shows its memory, so that the line
        is not wide."""
        parts = [f"step {row['step']}/{self._total}", *_describe(row)]
        if "peak_memory_gib" in row:
            self._peak = f"{self._memory} peak {row['peak_memory_gib']:.2f} GiB"
            parts += [self._peak] if self._progress is None else []
        if self._progress is None:
            self.print("  ".join(parts))
        else:
            self.print(fold(parts, "  ", self._progress.console.width))
            if self._peak:
                self._progress.update(self._progress.task_ids[0], description=self._peak)

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

    def __init__(self, console: Console, total_steps: int, plan: Plan, device: str) -> None:
        self._console, self._total_steps, self._device = console, total_steps, device
        self._compiling = plan.compile.backend != "eager" and any(unit.compiled for unit in plan.units)

    def start(self, position: "TrainPosition") -> None:
        memory = "tensors" if self._device == "cuda" else "process"
        self._console.start_progress(position.step, self._total_steps, self._compiling, memory)

    def after_step(self, done: StepDone) -> None:
        self._console.step_done(done.step)

    def on_report(self, row: Row) -> None:
        self._console.report(row)

    def close(self) -> None:
        self._console.close()


def _describe(row: Row) -> list[str]:
    parts = [f"loss {row['loss']:.4f}"] if "loss" in row else []
    if "eval_loss" in row:
        parts.append(f"eval loss {row['eval_loss']:.4f}")
    if "tokens_per_s" in row:
        rate, trained = (f"{row[name]:,.0f}" for name in ("tokens_per_s", "trained_tokens_per_s"))
        parts.append(f"{rate} tokens/s" if trained == rate else f"{rate} tokens/s ({trained} trained)")
        if "mfu" in row:
            parts.append(f"MFU {row['mfu']:.1%} (causal {row['mfu_causal']:.1%})")
        if row["recompiles"]:
            parts.append(f"{row['recompiles']} recompiles")
    return parts
