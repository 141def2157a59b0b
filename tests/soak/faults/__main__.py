"""Puts known faults into the product, one at a time, and records which test detects each: `python -m
tests.soak.faults -h`."""

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.soak.faults.broken import BROKEN
from tests.soak.faults.fault import Fault
from tests.soak.faults.forked import load_libraries
from tests.soak.faults.lines import commit_of, compare_lines, to_lines, write_lines
from tests.soak.faults.measure import LINES, SECONDS, measure
from tests.soak.faults.mended import MENDED
from tests.soak.faults.reach import Measured, choose_tests, read_measured
from tests.soak.faults.record import Outcome, Record, read_record, to_line, to_table
from tests.soak.faults.source import FaultError, Place, find_places, put_in, restore
from tests.soak.faults.trial import Limits, try_tests

ROOT = Path(__file__).parents[3]
FAULTS = (*MENDED, *BROKEN)
RECORDS = Path(__file__).parent / "records"
ROUNDS = 3  # of leaving out tests that turn out to fail without any fault


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested command; return 0 if every fault was caught."""
    options, rest = make_parser().parse_known_args(arguments)
    if rest and options.command != "coverage":
        raise FaultError(f"unknown: {' '.join(rest)}")
    if options.command == "coverage":
        return measure(
            options.at.resolve(), options.into.resolve(), [argument for argument in rest if argument != "--"]
        )
    if options.command == "check":
        for name, place in find_places(options.at.resolve(), FAULTS).items():
            print(f"{name}: {place.path}:{min(place.lines)}")
        return 0
    if options.command == "lines":
        lines = to_lines(options.at.resolve(), options.measured / LINES)
        write_lines(lines, options.record)
        print(f"{lines['covered']} of {lines['statements']} statements covered: {options.record}")
        if options.against:
            for loss in compare_lines(ROOT, lines, json.loads(options.against.read_text(encoding="utf-8"))):
                print(loss)
        return 0
    if options.command == "show":
        print(to_table(read_record(options.record, "")))
        return 0
    load_libraries()
    with scratch_copy(options.at) as root:
        record = run_all(root, options)
    print(to_table(record))
    return int(not all(one.caught for one in record.faults.values()))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with the commands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.faults",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog="First `coverage --into FOLDER -- -m 'not slow' tests`, which takes longer than the tests "
        "alone; then\n"
        "`run --measured FOLDER --record FILE`. Started again, it resumes with the faults that its record "
        "lacks.\n"
        "`lines --measured FOLDER --record FILE --against OLD` lists lines that are no longer reached.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check that every snippet occurs exactly once in the product")
    cover = commands.add_parser(
        "coverage", help="measure which lines each test reaches; arguments after -- are for pytest"
    )
    cover.add_argument(
        "--into", type=Path, required=True, metavar="FOLDER", help="a new folder for the measurement"
    )
    lines = commands.add_parser("lines", help="record the lines that no test has reached")
    lines.add_argument(
        "--measured", type=Path, required=True, metavar="FOLDER", help="the folder of `coverage`"
    )
    lines.add_argument("--record", type=Path, required=True, metavar="FILE", help="JSON file to write")
    lines.add_argument(
        "--against", type=Path, metavar="FILE", help="an older record: print what it has in addition"
    )
    for command in (check, cover, lines):
        command.add_argument(
            "--at", type=Path, default=ROOT, metavar="FOLDER", help="a checkout (default: this one)"
        )
    show = commands.add_parser("show", help="print a record as a table")
    run = commands.add_parser("run", help="put in one fault after the other, and run the tests that reach it")
    for command in (show, run):
        command.add_argument(
            "--record",
            type=Path,
            default=RECORDS / "after.json",
            metavar="FILE",
            help="JSON file of outcomes",
        )
    run.add_argument(
        "--at",
        type=Path,
        metavar="FOLDER",
        help="put the faults in here (default: a clone of the last commit)",
    )
    run.add_argument("--measured", type=Path, metavar="FOLDER", help="the folder of `coverage`")
    run.add_argument(
        "--lines", type=Path, metavar="FILE", help="coverage's data, instead of that of --measured"
    )
    run.add_argument(
        "--seconds",
        type=Path,
        metavar="FILE",
        help="JSON lines [test, seconds, ...], instead of those of --measured",
    )
    run.add_argument("--only", nargs="+", metavar="NAME", help="only these faults")
    run.add_argument("--again", choices=("survived", "all"), help="try the survived faults again, or all")
    run.add_argument("--most", type=int, default=40, metavar="N", help="tests for a fault (default 40)")
    run.add_argument("--slowest_s", type=float, default=60.0, help="skip tests that take longer (default 60)")
    run.add_argument(
        "--fault_s",
        type=float,
        default=120.0,
        help="seconds after which no test of a fault is started (default 120)",
    )
    run.add_argument(
        "--test_s",
        type=float,
        default=60.0,
        help="seconds after which a test counts as hung (default 60, or ten times its usual time)",
    )
    run.add_argument(
        "--hours", type=float, default=1.5, help="hours after which no fault is started (default 1.5)"
    )
    return parser


@contextmanager
def scratch_copy(at: Path | None) -> Iterator[Path]:
    """Yield the given folder, or a clone of the last commit, which is removed at the end."""
    if at is not None:
        yield at.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="faults-clone-", ignore_cleanup_errors=True) as name:
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), name], check=True)
        yield Path(name)


def run_all(root: Path, options: argparse.Namespace) -> Record:
    """Try every fault that the record lacks; then run the tests that caught one without a fault, and repeat
    for the faults whose tests fail in that case too."""
    undo = options.record.resolve().with_suffix(".undo")
    restore(undo)
    deadline_s = time.monotonic() + options.hours * 3600
    places = find_places(root, FAULTS)
    record = read_record(options.record.resolve(), commit_of(root))
    measured = _measured(options, places.values())
    wanted = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    forget = {fault.name for fault in wanted} if options.again else set()
    kept = (lambda outcome: outcome.caught) if options.again == "survived" else (lambda outcome: False)
    record.faults = {
        name: outcome for name, outcome in record.faults.items() if name not in forget or kept(outcome)
    }
    for _ in range(ROUNDS):
        for fault in wanted:
            if fault.name not in record.faults and time.monotonic() < deadline_s:
                outcome = try_fault(
                    root, fault, places[fault.name], measured, options, undo, record.fail_anyway
                )
                record.faults[fault.name] = dataclasses.replace(outcome, commit=record.commit)
                record.faults = {
                    known.name: record.faults[known.name] for known in FAULTS if known.name in record.faults
                }
                record.write()
                print(to_line(fault.name, outcome), flush=True)
        if not (unsound := find_unsound(root, record, measured, options, [fault.name for fault in wanted])):
            break
        print(f"fail without any fault: {', '.join(unsound)}", flush=True)
        record.fail_anyway = sorted({*record.fail_anyway, *unsound})
        record.faults = {
            name: outcome for name, outcome in record.faults.items() if outcome.test not in unsound
        }
        record.write()
    return record


def _measured(options: argparse.Namespace, places: Iterator[Place]) -> Measured:
    folder = options.measured
    lines = options.lines or (folder / LINES if folder else None)
    seconds = options.seconds or (folder / SECONDS if folder else None)
    return read_measured(lines, seconds, [place.path for place in places])


def try_fault(
    root: Path,
    fault: Fault,
    place: Place,
    measured: Measured,
    options: argparse.Namespace,
    undo: Path,
    without: Sequence[str],
) -> Outcome:
    """Put the fault in, run the tests that may catch it, and remove it. The outcome reports if they could not
    be run."""
    tests = choose_tests(root, fault, place, measured, options.most, options.slowest_s, without)
    if not tests:
        return Outcome(False, "", "no test is known to reach it", 0.0, 0)
    with put_in(root, fault, place, undo):
        trial = try_tests(root, tests, measured.seconds, Limits(options.fault_s, options.test_s))
    if trial.problem:
        return Outcome(False, "", f"pytest could not run: {trial.problem}", trial.seconds, len(trial.began))
    test, how = next(iter(trial.failed.items()), ("", ""))
    return Outcome(bool(test), test, how, round(trial.seconds, 1), len(trial.began))


def find_unsound(
    root: Path, record: Record, measured: Measured, options: argparse.Namespace, names: Sequence[str]
) -> list[str]:
    """Return the tests that caught these faults but also fail without any. Raises FaultError if they could
    not be run."""
    catchers = sorted(
        {outcome.test for name, outcome in record.faults.items() if name in names and "::" in outcome.test}
    )
    if not catchers:
        return []
    limits = Limits(3600.0, options.test_s)
    trial = try_tests(root, catchers, measured.seconds, limits, to_the_end=True)
    if trial.problem:
        raise FaultError(f"the tests that caught faults could not be run without any: {trial.problem}")
    return sorted(trial.failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a fault is removed
    try:
        sys.exit(main())
    except FaultError as error:
        sys.exit(str(error))
