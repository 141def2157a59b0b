"""Measure the lines of the product that each test reaches, and its duration: a run of the tests under
coverage."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.soak.faults.source import PRODUCT, FaultError

PLUGINS = Path(__file__).parent / "plugin"
LINES, SECONDS = "lines.sqlite", "seconds.jsonl"
CONFIG = """[run]
include = {include}
parallel = true
data_file = ${{COV_DATA}}
context = ${{COV_CONTEXT-}}
patch = _exit, subprocess
disable_warnings = no-data-collected, no-ctracer, module-not-measured, couldnt-parse
"""


def measure(root: Path, into: Path, pytest_arguments: Sequence[str]) -> int:
    """Run the tests of `root` under coverage, children and ranks included, and write the lines by test and
    the seconds of each test into `into`. Returns pytest's exit code; failing tests do not matter."""
    into.mkdir(parents=True, exist_ok=True)
    parts = into / "parts"
    if parts.exists() or (into / LINES).exists():
        raise FaultError(f"{into} already contains a measurement: use another folder")
    parts.mkdir()
    config = into / "coverage.cfg"
    config.write_text(
        CONFIG.format(include=", ".join(f"{root}/{name}/*" for name in PRODUCT)), encoding="utf-8"
    )
    env = {
        **os.environ,
        "COV_CONFIG": str(config),
        "COV_DATA": str(parts / "data"),
        "COV_CONTEXT": "",
        "COV_SECONDS": str(into / SECONDS),
        "PYTHONPATH": f"{root}:{PLUGINS}",
    }
    coverage = [sys.executable, "-m", "coverage"]
    pytest = [
        "-m",
        "pytest",
        "-p",
        "covered",
        "-p",
        "no:randomly",
        "-p",
        "no:xdist",
        "-p",
        "no:benchmark",
        *pytest_arguments,
    ]
    ended = subprocess.run([*coverage, "run", f"--rcfile={config}", *pytest], cwd=root, env=env, check=False)
    files = sorted(map(str, parts.iterdir()))
    for first in range(0, len(files), 1000):  # a command line is limited
        append = ["--append"] if first else []
        subprocess.run(
            [
                *coverage,
                "combine",
                "-q",
                f"--rcfile={config}",
                f"--data-file={into / LINES}",
                "--keep",
                *append,
                *files[first : first + 1000],
            ],
            cwd=root,
            env=env,
            check=False,
        )
    if not (into / LINES).exists():
        raise FaultError(f"nothing was measured: see pytest's output; its exit code was {ended.returncode}")
    return ended.returncode
