"""Forks start like commands."""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from tests.support.forks import PRELOADED, fork
from tests.support.launch import LIMIT_S


def describe(path: Path) -> None:
    """Write the state of a new child process to a file."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    state = {
        "threads": len(os.listdir("/proc/self/task")),
        "group": dist.is_initialized(),
        "not imported": [name for name in PRELOADED if name not in sys.modules],
        "ignored signals": [n.name for n, handler in handlers.items() if signal.getsignal(n) is not handler],
    }
    path.write_text(json.dumps(state))


def test_a_fork_begins_with_one_thread_no_group_all_imports_and_default_signals(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fork(describe, out, output=tmp_path / "log").wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    expected = {"threads": 1, "group": False, "not imported": [], "ignored signals": []}
    assert json.loads(out.read_text()) == expected
