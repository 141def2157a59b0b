"""What all tests share: one folder of caches, one seed, one thread to a process, and signals that are
heard."""

import atexit
import os
import shutil
import signal
import tempfile
import zlib
from datetime import date
from typing import Any

# What lasts longer than a session: the fake GPU (tests/fake_gpu/install.py), below the user's own home.
if (HOME := os.path.expanduser("~")) != "~":
    os.environ.setdefault("MESHWRIGHT_TESTS_CACHE", f"{HOME}/.cache/meshwright-tests")
# One home for the whole session, so one cache of compiled graphs, of tokens and of traced work
# (~/.cache/meshwright): found by every process that a test starts, and gone afterwards. The workers of
# pytest-xdist have it from the process that starts them.
if "MESHWRIGHT_TESTS_HOME" not in os.environ:
    os.environ["MESHWRIGHT_TESTS_HOME"] = tempfile.mkdtemp(prefix="meshwright-tests-")
    atexit.register(shutil.rmtree, os.environ["MESHWRIGHT_TESTS_HOME"], ignore_errors=True)
os.environ["HOME"] = os.environ["MESHWRIGHT_TESTS_HOME"]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{os.environ['HOME']}/.cache/meshwright/compile"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Of what is slowest a run takes a part. A seed is a number, or "all"; as a rule it is the day's.
os.environ.setdefault("MESHWRIGHT_TESTS_SEED", str(date.today().toordinal()))
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait by spinning are slow beside other work

import pytest
import torch  # it reads these variables
from _pytest.mark.expression import Expression

from tests.support.gpu import FAKE

torch.set_num_threads(1)

# A shell starts what it puts in the background with SIGINT ignored, nohup with SIGHUP, and who is started by
# it ignores them too. A handler is not handed on: what a test starts hears them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_configure(config: Any) -> None:
    # Tests that are not about a GPU do not see one: they pass alike on every machine.
    asked = config.option.markexpr
    if not asked or not Expression.compile(asked).evaluate(lambda name, **_: name == "gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # of pytest-xdist: what takes longest, to compile and to train, comes first
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip what needs a GPU where there is none; and what is marked `sampled(n)` on all days but one of n,
    what has the same `together=NAME` on the same days.

    They take turns, so that no day has many of them: which day is whose depends on what is collected.
    """
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and -m gpu"))
        if item.get_closest_marker("values") and FAKE:
            item.add_marker(pytest.mark.skip(reason="needs values, and the fake GPU computes none"))
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    marks = [(item, mark) for item in items for mark in item.iter_markers("sampled")]
    marked = [(item, mark.args[0], mark.kwargs.get("together", item.nodeid)) for item, mark in marks]
    order = sorted({what for _, _, what in marked}, key=lambda what: zlib.crc32(what.encode()))
    for item, days, what in marked:
        if seed != "all" and (order.index(what) + int(seed)) % days:
            item.add_marker(
                pytest.mark.skip(reason=f"one run of {days} takes it, and MESHWRIGHT_TESTS_SEED=all")
            )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    terminalreporter.write_line(
        f"slow tests were sampled with MESHWRIGHT_TESTS_SEED={seed} (all: takes every one)"
    )
