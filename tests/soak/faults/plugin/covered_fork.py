"""Runs a process that is forked for a test under coverage: it replaces `_run` of tests/support/forks.py."""

import os
from collections.abc import Mapping
from typing import Any

COVERAGE = ("COVERAGE_PROCESS_START", "COV_CONFIG", "COV_CONTEXT", "COV_DATA")


def run(function: Any, arguments: Any, output: Any, errors: Any, env: Mapping[str, str], folder: Any) -> None:
    """Measure from here on, for the test that `env` names; the data is written when the process ends."""
    import coverage

    from tests.support import forks

    os.environ |= {name: env[name] for name in COVERAGE if name in env}
    coverage.process_startup()
    forks._run(function, arguments, output, errors, env, folder)
