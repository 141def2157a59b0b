"""What a person sees: log lines from rank 0, and on a terminal a live line of progress."""

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Console:
    """Plain lines on standard output; on a terminal the last line is a progress bar. Silent on other
    ranks."""

    def __init__(self, is_main: bool) -> None:
        self._is_main = is_main
        self._progress: Progress | None = None
        self._total = 0

    def print(self, text: str) -> None:
        """Print a line (or several)."""
        if not self._is_main:
            return
        try:
            if self._progress is not None:
                self._progress.console.print(text, markup=False, highlight=False)
            else:
                print(text, flush=True)
        except OSError:  # the terminal, or whoever read the pipe, is gone: training goes on without
            self._leave()

    def print_lines(self, texts: Iterable[str]) -> None:
        """Print each of them."""
        for text in texts:
            self.print(text)

    def start_progress(self, done: int, total: int) -> None:
        """Show the live line, if this is a terminal."""
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
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def report(self, row: dict[str, Any]) -> None:
        """Show a row of metrics: in the live line, or as a line of its own."""
        text = _describe(row)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=text)
            if "eval_loss" in row:
                self.print(f"step {row['step']}/{self._total}  {text}")
        else:
            self.print(f"step {row['step']}/{self._total}  {text}")

    def close(self) -> None:
        """Leave the live line."""
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.stop()
            self._progress = None

    def _leave(self) -> None:
        """Say nothing any more, and let nobody else try: Python's own last flush would fail."""
        self._is_main = False
        self.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _describe(row: dict[str, Any]) -> str:
    parts = [f"loss {row['loss']:.4f}"] if "loss" in row else []
    if "eval_loss" in row:
        parts.append(f"eval loss {row['eval_loss']:.4f}")
    if "tokens_per_s" in row:
        parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
        if "mfu" in row:
            parts.append(f"MFU {row['mfu']:.1%} (causal {row['mfu_causal']:.1%})")
        parts.append(f"{row['peak_memory_gib']:.2f} GiB")
        if row["recompiles"]:
            parts.append(f"{row['recompiles']} recompiles")
    return "  ".join(parts)
