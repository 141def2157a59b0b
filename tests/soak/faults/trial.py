"""Run some tests until the first failure or the time limit."""

import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak.faults.forked import ForkedPytest
from tests.soak.faults.measure import PLUGINS

POLL_S = 0.2
START_S = 120.0  # limit until pytest begins the first test, more than a busy machine needs
NOT_FOUND = 4  # pytest's exit code for a test that does not exist


@dataclass(frozen=True)
class Limits:
    """When to stop: after `all_s` no test is started, and a test hangs that takes `test_s` or ten times its
    usual time, whichever is longer."""

    all_s: float
    test_s: float


@dataclass(frozen=True)
class Trial:
    """The result: the tests that failed, each with how; the tests that began; seconds; and why pytest could
    not run."""

    failed: Mapping[str, str]
    began: tuple[str, ...]
    seconds: float
    problem: str = ""


def try_tests(
    root: Path, tests: Sequence[str], usual_s: Mapping[str, float], limits: Limits, to_the_end: bool = False
) -> Trial:
    """Run the tests in this order, with their own home folder, which is removed together with every process
    that they have started."""
    start_s, mark = time.monotonic(), secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "home").mkdir()
        (folder / "tests").write_text("\n".join(tests) + "\n", encoding="utf-8")
        (folder / "heard").touch()
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("COV_", "COVERAGE_"))
        }
        env |= {
            "HOME": str(folder / "home"),
            "MESHWRIGHT_TESTS_HOME": str(folder / "home"),
            "PYTHONPATH": f"{root}:{PLUGINS}",
            "FAULTS_HEARD": str(folder / "heard"),
            "FAULTS_MARK": mark,
            "FAULTS_UNTIL_S": str(start_s + limits.all_s),
        }
        arguments = [
            *([] if to_the_end else ["-x"]),
            "-q",
            "-p",
            "heard",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "-p",
            "no:xdist",
            "-p",
            "no:benchmark",
            f"--basetemp={folder / 'temp'}",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            f"@{folder / 'tests'}",
        ]
        pytest = ForkedPytest(root, arguments, env, folder / "output")
        try:
            hung = _wait(pytest, folder / "heard", usual_s, limits)
        finally:
            pytest.kill()
            _end_marked(mark)
        events = _read(folder / "heard")
        failed = {
            entry["failed"]: f"{entry['when']}: {entry['why']}"
            for entry in reversed(events)
            if "failed" in entry
        }
        if hung:
            failed[hung] = "it hung"
        began = tuple(entry["began"] for entry in events if "began" in entry)
        output = (folder / "output").read_text(
            errors="replace"
        ).strip() or "it began no test and printed nothing"
        unable = not failed and (not began or pytest.returncode == NOT_FOUND)
        return Trial(
            failed, began, time.monotonic() - start_s, "\n".join(output.splitlines()[-5:]) if unable else ""
        )


def _wait(pytest: ForkedPytest, events: Path, usual_s: Mapping[str, float], limits: Limits) -> str:
    """Wait until pytest has ended, or begins no test in time, and return ""; or return the test that
    hangs."""
    start_s = time.monotonic()
    while pytest.poll() is None:
        time.sleep(POLL_S)
        entries = [entry for entry in _read(events) if "began" in entry]
        if not entries:
            if time.monotonic() - start_s > START_S + limits.test_s:
                return ""
            continue
        test = entries[-1]["began"]
        if time.monotonic() - entries[-1]["at_s"] > max(limits.test_s, 10 * usual_s.get(test, 0.0)):
            return str(test)
    return ""


def _read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last line may be incomplete
    return [json.loads(line) for line in lines]


def _end_marked(mark: str) -> None:
    """Kill every process that pytest has started, also in other sessions: each has the mark in its
    environment."""
    wanted = f"FAULTS_MARK={mark}".encode()
    for _ in range(5):
        living = [path for path in Path("/proc").glob("[0-9]*/environ") if _has(path, wanted)]
        for path in living:
            with suppress(ProcessLookupError):
                os.kill(int(path.parent.name), signal.SIGKILL)
        if not living:
            return
        time.sleep(POLL_S)


def _has(environ: Path, wanted: bytes) -> bool:
    try:
        return wanted in environ.read_bytes().split(b"\0")
    except OSError:
        return False
