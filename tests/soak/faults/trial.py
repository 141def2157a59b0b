"""Run some tests until the first failure or the time limit."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.2
# a line per test, and at the end one per failed test with its error
OPTIONS = ("-vv", "-rfE", "--tb=no", "-pno:cacheprovider", "-pno:randomly", "-pno:xdist", "-pno:benchmark")
TEST = re.compile(r"^(tests/\S+::.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED).*)?$", re.MULTILINE)
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    """The result: the tests that failed, each with how; the number of tests that began; and the end of what
    pytest printed."""

    failed: Mapping[str, str]
    began: int
    printed: str


def try_tests(root: Path, tests: Sequence[str], limit_s: float, *options: str) -> Trial:
    """Run the tests in a home folder of their own, and remove it with every process that they have started.
    The test that runs after `limit_s` seconds hangs."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        env = {
            **os.environ,
            **{"HOME": name, "MESHWRIGHT_TESTS_HOME": name, "PYTHONPATH": str(root)},
            **{"FAULTS_MARK": mark, "COLUMNS": "300"},
        }
        command = [sys.executable, "-m", "pytest", *OPTIONS, *options, f"--basetemp={name}/temp", *tests]
        path, hung = Path(name) / "output", False
        with path.open("wb") as output:
            pytest = subprocess.Popen(
                command, cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                pytest.wait(limit_s)
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                pytest.kill()
                pytest.wait()
                _kill_marked(mark)
        printed = path.read_text(encoding="utf-8", errors="replace")
    began = TEST.findall(printed)
    failed = {test: how[:300] for test, how in reversed(FAILED.findall(printed))}
    if hung and began:
        failed = {began[-1].strip(): "it hung"}
    return Trial(failed, len(began), "\n".join(printed.strip().splitlines()[-5:]))


def _kill_marked(mark: str) -> None:
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
