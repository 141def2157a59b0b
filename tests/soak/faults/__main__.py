"""Puts known faults into the product, one at a time, and records which test detects each: `python -m
tests.soak.faults -h`."""

import argparse
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from tests.soak.faults.broken import BROKEN
from tests.soak.faults.fault import Fault
from tests.soak.faults.mended import MENDED
from tests.soak.faults.order import order_tests
from tests.soak.faults.record import Outcome, Record, read_record, to_line, to_table
from tests.soak.faults.source import ROOT, FaultError, Place, find_places, put_in, restore
from tests.soak.faults.trial import try_tests

FAULTS = (*MENDED, *BROKEN)
RECORD = Path(__file__).parent / "records" / "after.json"
EVERYDAY = ("-m", "not slow and not sampled")
FAULT_S = 240.0  # after which no test of a fault is started
TEST_S = 120.0  # a test that takes longer hangs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested command; return 0 if every fault was caught."""
    options = make_parser().parse_args(arguments)
    if options.command == "show":
        print(to_table(read_record(options.record)))
        return 0
    with checkouts(options.at, options.processes) as roots:
        record = Run(roots, options).run()
    print(to_table(record))
    return int(not all(outcome.caught for outcome in record.faults.values()))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with the commands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.faults",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog="For each fault, `run` first tries the test that caught it last, then the tests about its\n"
        "module, then those that import it. All faults take about ten minutes on two cores. Started\n"
        "again, it resumes with the faults that its record lacks.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print a record as a table")
    run = commands.add_parser("run", help="put in one fault after the other, and run the tests about it")
    for command in (show, run):
        command.add_argument(
            "--record", type=Path, default=RECORD, metavar="FILE", help="the outcomes (default: %(default)s)"
        )
    run.add_argument(
        "--at",
        type=Path,
        metavar="FOLDER",
        help="put the faults in here (default: clones of the last commit)",
    )
    run.add_argument(
        "--processes", type=int, default=2, metavar="N", help="faults at the same time (default 2)"
    )
    run.add_argument(
        "--everyday", action="store_true", help="only tests that run every day: not slow or sampled"
    )
    run.add_argument("--only", nargs="+", metavar="NAME", help="only these faults")
    run.add_argument("--again", choices=("survived", "all"), help="try the survived faults again, or all")
    return parser


@contextmanager
def checkouts(at: Path | None, processes: int) -> Iterator[list[Path]]:
    """Yield the given folder, or clones of the last commit, which are removed at the end."""
    if at is not None:
        yield [at.resolve()]
        return
    with tempfile.TemporaryDirectory(prefix="faults-clones-", ignore_cleanup_errors=True) as name:
        roots = [Path(name) / str(number) for number in range(processes)]
        for root in roots:
            subprocess.run(["git", "clone", "-q", str(ROOT), str(root)], check=True)
        yield roots


class Run:
    """All faults that the record lacks, each tried in one of the checkouts."""

    def __init__(self, roots: Sequence[Path], options: argparse.Namespace) -> None:
        for root in roots:
            restore(_undo(root))
        self._places, self._options, self._roots = find_places(roots[0], FAULTS), options, roots
        self._free, self._lock = queue.SimpleQueue[Path](), Lock()
        for root in roots:
            self._free.put(root)
        self._known = read_record(RECORD)  # which test to try first
        self._record = read_record(options.record)
        self._record.commit = commit_of(roots[0])
        self._pytest_options = EVERYDAY if options.everyday else ()

    def run(self) -> Record:
        """Try the faults; then run the tests that caught one without any fault, and count no test that fails
        there."""
        wanted = [fault for fault in FAULTS if fault.name in (self._options.only or self._places)]
        for fault in wanted:
            outcome = self._record.faults.get(fault.name)
            if outcome and (self._options.again == "all" or (self._options.again and not outcome.caught)):
                del self._record.faults[fault.name]
        todo = [fault for fault in wanted if fault.name not in self._record.faults]
        self._each(todo, self._try_fault)
        tests = sorted({found.test for f in todo if (found := self._record.faults[f.name]).test})
        groups = [group for n in range(len(self._roots)) if (group := tests[n :: len(self._roots)])]
        self._each(groups, self._run_without_fault)
        return self._record

    def _each(self, items: Sequence[Any], work: Callable[[Path, Any], None]) -> None:
        """Do the work for each item, in as many threads as there are checkouts."""

        def in_checkout(item: Any) -> None:
            root = self._free.get()
            try:
                work(root, item)
            finally:
                self._free.put(root)

        with ThreadPoolExecutor(len(self._roots)) as pool:
            list(pool.map(in_checkout, items))

    def _try_fault(self, root: Path, fault: Fault) -> None:
        outcome = self._outcome(root, fault, self._places[fault.name])
        with self._lock:
            found = {**self._record.faults, fault.name: outcome}
            self._record.faults = {known.name: found[known.name] for known in FAULTS if known.name in found}
            self._record.write()
            print(to_line(fault.name, outcome), flush=True)

    def _outcome(self, root: Path, fault: Fault, place: Place) -> Outcome:
        """Put the fault in, run the tests that may catch it, and remove it."""
        last = self._known.faults.get(fault.name)
        groups = order_tests(place.path, last.test if last else "")
        start_s, ran, printed, failed = time.monotonic(), 0, "", ("", "")
        with put_in(root, fault, place, _undo(root)):
            for tests in groups:
                tests = [test for test in tests if (root / test.partition("::")[0]).exists()]
                left_s = start_s + FAULT_S - time.monotonic()
                if not tests or left_s < 0:
                    continue
                limit_s = TEST_S if len(tests) == 1 and "::" in tests[0] else left_s + TEST_S
                trial = try_tests(root, tests, limit_s, "-x", *self._pytest_options)
                ran, printed = ran + trial.began, trial.printed
                if trial.failed:
                    failed = list(trial.failed.items())[-1]
                    break
        if not ran and not failed[0]:
            failed = ("", f"no test could run: {printed}")
        seconds = round(time.monotonic() - start_s, 1)
        return Outcome(bool(failed[0]), *failed, seconds, ran, self._record.commit)

    def _run_without_fault(self, root: Path, tests: Sequence[str]) -> None:
        trial = try_tests(root, tests, TEST_S * len(tests))
        if not trial.began:
            raise FaultError(f"the tests that caught faults could not be run without any: {trial.printed}")
        with self._lock:
            for name, outcome in list(self._record.faults.items()):
                if outcome.test in trial.failed:
                    how = f"{outcome.test} fails without any fault too"
                    self._record.faults[name] = Outcome(
                        False, "", how, outcome.seconds, outcome.ran, outcome.commit
                    )
                    print(f"{name}: {how}", flush=True)
            self._record.write()


def commit_of(root: Path) -> str:
    """Return the short name of a checkout's last commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def _undo(root: Path) -> Path:
    return root.parent / f".{root.name}-undo.json"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a fault is removed
    try:
        sys.exit(main())
    except FaultError as error:
        sys.exit(str(error))
