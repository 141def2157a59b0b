"""Run some tests until the first failure or the time limit."""

import json
import os
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
from typing import Any

PLUGINS = Path(__file__).parent / "plugin"
POLL_S = 0.2
START_S = 120.0  # limit until pytest begins the first test, more than a busy machine needs
PLUGIN_OPTIONS = [
    f"-p{name}" for name in ("events", "no:cacheprovider", "no:randomly", "no:xdist", "no:benchmark")
]


@dataclass(frozen=True)
class Trial:
    """The result: the tests that failed, each with how; the number of tests that began; and the end of what
    pytest printed."""

    failed: Mapping[str, str]
    began: int
    printed: str


def try_tests(root: Path, tests: Sequence[str], until_s: float, hung_s: float, *options: str) -> Trial:
    """Run the tests in a home folder of their own, and remove it with every process that they have started.

    until_s: the moment (time.monotonic) after which no test is started; hung_s: a test that takes longer
        hangs.
    """
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "events").touch()
        env = {
            **os.environ,
            "HOME": name,
            "MESHWRIGHT_TESTS_HOME": name,
            "PYTHONPATH": f"{root}:{PLUGINS}",
            "FAULTS_EVENTS": str(folder / "events"),
            "FAULTS_MARK": mark,
            "FAULTS_UNTIL_S": str(until_s),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *PLUGIN_OPTIONS,
            *options,
            f"--basetemp={folder / 'temp'}",
            *tests,
        ]
        with open(folder / "output", "w+", encoding="utf-8") as output:
            pytest = subprocess.Popen(
                command, cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                hung = _wait(pytest, folder / "events", hung_s)
            finally:
                pytest.kill()
                pytest.wait()
                _kill_marked(mark)
            output.seek(0)
            printed = output.read().strip().splitlines()[-5:]
        events = _read(folder / "events")
        failed = {event["failed"]: event["how"] for event in reversed(events) if "failed" in event}
        failed |= {hung: "it hung"} if hung else {}
        return Trial(failed, sum("began" in event for event in events), "\n".join(printed))


def _wait(pytest: subprocess.Popen[bytes], events: Path, hung_s: float) -> str:
    """Wait until pytest has ended, or begins no test in time, and return ""; or return the test that
    hangs."""
    start_s, test = time.monotonic(), ""
    while pytest.poll() is None:
        time.sleep(POLL_S)
        began = [event for event in _read(events) if "began" in event]
        since_s, test = (began[-1]["at_s"], began[-1]["began"]) if began else (start_s + START_S, "")
        if time.monotonic() - since_s > hung_s:
            return str(test)
    return ""


def _read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last line may be incomplete
    return [json.loads(line) for line in lines]


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
