"""A pytest plugin for a run under coverage: it records every line with the test for which it ran, in any
process, and the seconds of every test.

A context is a test's name and the phase, such as `tests/train/test_step.py::test_a_step|setup`. Processes
that a test starts read it from the environment; forked processes (tests/support/forks.py) start measuring in
the child (covered_fork.py).
"""

import json
import os
import time
from collections.abc import Iterator

import coverage
import covered_fork
import pytest

# The configuration that coverage passes to children would contain this process's context: they must read the
# file again.
os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
os.environ["COVERAGE_PROCESS_START"] = os.environ["COV_CONFIG"]


def pytest_collection_finish() -> None:
    """Have forked processes measured, if there are any."""
    try:
        from tests.support import forks
    except ImportError:
        return
    start = forks._start_server

    def start_unmeasured() -> None:
        saved = os.environ.pop("COVERAGE_PROCESS_START")
        try:
            start()
        finally:
            os.environ["COVERAGE_PROCESS_START"] = saved

    forks._start_server = start_unmeasured
    forks._run = covered_fork.run
    forks._context.set_forkserver_preload([*getattr(forks, "PRELOADED", ()), "coverage", "covered_fork"])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    with open(os.environ["COV_SECONDS"], "a", encoding="utf-8") as file:
        file.write(json.dumps([item.nodeid, round(time.perf_counter() - start_s, 3)]) + "\n")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _enter(item, "setup")
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _enter(item, "call")
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    _enter(item, "teardown")
    yield


def _enter(item: pytest.Item, phase: str) -> None:
    context = f"{item.nodeid}|{phase}"
    os.environ["COV_CONTEXT"] = context
    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(context)
