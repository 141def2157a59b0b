"""A pytest plugin that records immediately which test begins and which fails, and stops the session at the
time limit."""

import json
import os
import time
from collections.abc import Iterator

import pytest


def _record(**entry: str) -> None:
    with open(os.environ["FAULTS_EVENTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps({**entry, "at_s": time.monotonic()}) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _record(began=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _record(failed=report.nodeid, how=f"{report.when}: {_first_error(report.longreprtext)}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _record(failed=report.nodeid, how=f"collect: {_first_error(report.longreprtext)}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    yield
    if time.monotonic() > float(os.environ["FAULTS_UNTIL_S"]):
        item.session.shouldstop = "time is up"


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines() or [""]
    return lines[0][:300]
