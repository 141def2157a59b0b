"""The setup of all tests: one cache folder, one seed, one thread per process, and signal handlers."""

import atexit
import functools
import gc
import os
import shutil
import signal
import tempfile
import zlib
from datetime import date
from pathlib import Path
from typing import Any

# Kept between sessions, in the user's home: the fake GPU (tests/fake_gpu/commands.py).
if (HOME := os.path.expanduser("~")) != "~":
    os.environ.setdefault("MESHWRIGHT_TESTS_CACHE", f"{HOME}/.cache/meshwright-tests")
# One home for the session, with one cache of compiled graphs, tokens and traced work (~/.cache/meshwright).
# Every process of the tests uses it, and it is deleted at the end. The workers of pytest-xdist inherit it
# from the process that starts them.
if "MESHWRIGHT_TESTS_HOME" not in os.environ:
    os.environ["MESHWRIGHT_TESTS_HOME"] = tempfile.mkdtemp(prefix="meshwright-tests-")
    atexit.register(shutil.rmtree, os.environ["MESHWRIGHT_TESTS_HOME"], ignore_errors=True)
os.environ["HOME"] = os.environ["MESHWRIGHT_TESTS_HOME"]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{os.environ['HOME']}/.cache/meshwright/compile"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# A session runs a sample of the slowest tests. The seed is a number or "all"; by default it is the day.
os.environ.setdefault("MESHWRIGHT_TESTS_SEED", str(date.today().toordinal()))
os.environ["OMP_WAIT_POLICY"] = "passive"  # spinning threads slow down other processes

import pytest
import torch  # after the variables above, which it reads
from _pytest.mark.expression import Expression

from tests.support.changed import changed_files, distance
from tests.support.gpu import FAKE

torch.set_num_threads(1)

# A shell starts background commands with SIGINT ignored, nohup with SIGHUP ignored, and child processes
# inherit this. They do not inherit handlers: with handlers here, processes of the tests receive both signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--changed",
        action="store_true",
        help="run only the test files that the uncommitted changes (if there are none: those of the last "
        "commit) can affect, by imports, the nearest first",
    )


@functools.cache
def _distance(path: Path) -> int | None:
    return distance(path, changed_files())


def pytest_ignore_collect(collection_path: Path, config: Any) -> bool | None:
    """Leave out the test files that a change cannot affect."""
    if not config.getoption("changed") or not collection_path.match("test_*.py"):
        return None
    return _distance(collection_path) is None or None


def pytest_sessionstart() -> None:
    gc.disable()  # collecting creates millions of objects that stay


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_configure(config: Any) -> None:
    # Tests without the mark `gpu` see no GPU, so that they behave the same on every machine.
    requested = config.option.markexpr
    if not requested or not Expression.compile(requested).evaluate(lambda name, **_: name == "gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # pytest-xdist keeps the order, in which the slowest tests, compiling and training, come first
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip tests that need a GPU if there is none, and tests marked `sampled(n)` on all days but one of n.
    With `--changed` the tests nearest to the change come first.

    Tests with the same `together=NAME` run on the same day. Tests are distributed evenly over the days, so a
    test's day depends on the collected tests; `sampled(n, day=i)` chooses it, so that tests whose cost is
    known make equal days. Of several such marks that with the most days counts.
    """
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and -m gpu"))
        if item.get_closest_marker("values") and FAKE:
            item.add_marker(pytest.mark.skip(reason="needs values, and the fake GPU computes none"))
    if items and items[0].config.getoption("changed"):
        items.sort(key=lambda item: _distance(item.path))
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    marks = [
        (item, max(found, key=lambda mark: mark.args[0]))
        for item in items
        if (found := [*item.iter_markers("sampled")])
    ]
    marked = [(item, mark, mark.kwargs.get("together", item.nodeid)) for item, mark in marks]
    order = sorted({group for *_, group in marked}, key=lambda group: zlib.crc32(group.encode()))
    for item, mark, group in marked:
        days, day = mark.args[0], mark.kwargs.get("day", order.index(group))
        if seed != "all" and (day + int(seed)) % days:
            item.add_marker(
                pytest.mark.skip(reason=f"runs on one day of {days}, and with MESHWRIGHT_TESTS_SEED=all")
            )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    terminalreporter.write_line(
        f"slow tests were sampled with MESHWRIGHT_TESTS_SEED={seed} (all: runs every test)"
    )
