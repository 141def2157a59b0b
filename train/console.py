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
    """Prints plain lines to standard output, on a terminal above the progress bar of a `Screen`; only on
    rank 0."""

    def __init__(self, is_main: bool) -> None:
        self.prints = is_main
        self.bar: Progress | None = None

    def print(self, text: str) -> None:
        if not self.prints:
            return
        try:
            if self.bar is not None:
                # soft: the terminal breaks long lines, so that a path is copied as one word
                self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)
        except OSError:  # the terminal or the pipe's reader has exited: training continues without output
            self.prints = False
            self.close()
            # Python's flush at exit would fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def print_lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.print(text)

    def close(self) -> None:
        """Stop the progress bar."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.stop()
            self.bar = None


class Screen(Hook):
    """The progress of a run on the console: each row of metrics as a line, and on a terminal a bar."""

    def __init__(self, console: Console, total_steps: int, plan: Plan, device: str) -> None:
        self._console, self._total_steps = console, total_steps
        self._compiling = plan.compile.backend != "eager" and any(unit.compiled for unit in plan.units)
        self._memory, self._peak = "tensors" if device == "cuda" else "process", ""

    def start(self, position: "TrainPosition") -> None:
        if self._console.prints and sys.stdout.isatty():
            columns = (
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=16),
                TextColumn("{task.description}"),
                TimeRemainingColumn(elapsed_when_finished=True),
            )
            self._console.bar = bar = Progress(*columns, console=RichConsole(highlight=False))
            first = "first step: compiling" if self._compiling else "first step"
            bar.add_task(first, completed=position.step, total=self._total_steps)
            bar.start()

    def after_step(self, done: StepDone) -> None:
        """Advance the bar; it shows the memory of the last report, so that the lines are not wide."""
        if (bar := self._console.bar) is not None:
            bar.update(bar.task_ids[0], completed=done.step, description=self._peak)

    def on_report(self, row: Row) -> None:
        parts, bar = [f"step {row['step']}/{self._total_steps}", *_describe(row)], self._console.bar
        if "peak_memory_gib" in row:
            self._peak = f"{self._memory} peak {row['peak_memory_gib']:.2f} GiB"
            parts += [self._peak] if bar is None else []
        if bar is None:
            self._console.print("  ".join(parts))
        else:
            self._console.print(fold(parts, "  ", bar.console.width))
            if self._peak:
                bar.update(bar.task_ids[0], description=self._peak)

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
