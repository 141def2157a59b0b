"""train/console.py: lines stay above the progress bar of a terminal; the reader of the output may exit."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from tests.support.launch import ROOT, environment

WRITE = """
import sys
from unittest.mock import Mock
from meshwright.train.console import Console, Screen
from tests.support.steps import step_done
console = Console(is_main=True)
for step in range(100_000):
    console.print(f"step {step}")
screen = Screen(console, 10, Mock(units=[]), "cpu")
screen.start(step_done(0).position)
screen.close()
print("done", file=sys.stderr)
"""


def test_a_reader_that_leaves_does_not_end_what_it_read() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout
        assert writer.stderr
        assert writer.stdout.readline() == "step 0\n"
        writer.stdout.close()
        assert writer.stderr.read() == "done\n"
    assert writer.returncode == 0


REPORT = """
import sys
from unittest.mock import Mock
from meshwright.train.console import Console, Screen
from tests.support.steps import step_done
console = Console(is_main=True)
backend = "inductor" if sys.argv[1] == "compiling" else "eager"
plan = Mock(units=[Mock(compiled=True)], **{"compile.backend": backend})
screen = Screen(console, 10_000, plan, "cuda")
screen.start(step_done(0).position)
rate = {"tokens_per_s": 123456.7, "trained_tokens_per_s": 123456.7, "mfu": 0.4567, "mfu_causal": 0.4123}
row = {"loss": 2.34567, "peak_memory_gib": 67.891, "recompiles": 0, **rate}
for step in range(1000, 1040):
    screen.after_step(step_done(step))
    screen.on_report(row | {"step": step})
screen.on_report(row | {"step": 1040, "eval_loss": 2.5})
console.print("saved " + "long/" * 20)
screen.close()
"""
LINE = "step {}/10000  loss 2.3457  123,457 tokens/s  MFU 45.7% (causal 41.2%)"
LAST = "step 1040/10000  loss 2.3457  eval loss 2.5000  123,457 tokens/s"


@pytest.mark.parametrize("first", ["compiling", "eager"])
def test_a_terminal_keeps_every_line_above_the_bar(first: str) -> None:
    """On a pseudo-terminal of 80 columns and 24 lines, which show fewer lines than are written."""
    written = written_to_terminal(REPORT, first)
    assert ("first step: compiling" in written, "first step" in written) == (first == "compiling", True)
    lines = scrollback(written)
    reports = [*(LINE.format(step) for step in range(1000, 1040)), LAST, "  MFU 45.7% (causal 41.2%)"]
    assert lines[:42] == reports
    assert lines[42] == "saved " + "long/" * 20, "one line, so that it can be copied"
    (bar,) = filter(None, lines[43:])
    assert re.fullmatch(r"step 1039/10000 \S+ tensors peak 67\.89 GiB \S+", bar)
    assert all(len(line) <= 80 for line in (*reports, bar))


def written_to_terminal(code: str, argument: str) -> str:
    """Run Python code whose standard output is a terminal; return all that it writes."""
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command, written = [sys.executable, "-c", code, argument], b""
    with subprocess.Popen(command, cwd=ROOT, env=environment() | {"TERM": "xterm"}, stdout=terminal):
        os.close(terminal)
        with contextlib.suppress(OSError):  # Linux: at the end
            while chunk := os.read(ours, 2**16):
                written += chunk
    os.close(ours)
    return written.decode()


def scrollback(written: str) -> list[str]:
    """Return the lines of a terminal after the text, which may move up, erase lines and set colours."""
    lines, at, column = [""], 0, 0
    for text, sequence, amount, kind in re.findall(
        r"([^\x1b\r\n]+)|(\x1b\[[?]?(\d*)[;\d]*([A-Za-z])|\r|\n)", written
    ):
        if text:
            lines[at] = lines[at][:column].ljust(column) + text + lines[at][column + len(text) :]
            column += len(text)
        elif sequence == "\r":
            column = 0
        elif sequence == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif kind == "A":
            at -= int(amount or 1)
        elif kind == "K":
            lines[at] = ""
    return [line.rstrip() for line in lines]
