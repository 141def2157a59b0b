"""Choose the tests that can catch a fault: those that reach its lines, the likeliest and quickest first."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.soak.faults.fault import Fault
from tests.soak.faults.source import Place

PHASES = ("setup", "call", "teardown")
UNKNOWN_S = 5.0  # of a test that was not timed
QUICK_S = 20.0  # tests that take this long together are tried, whatever their number
# tests that are tried before the others: cases of one test, tests of one file
OF_A_FUNCTION, OF_A_FILE = 2, 8


@dataclass  # not frozen: `known` is cached
class Measured:
    """The result of a run under coverage: seconds of each test, and by file and line the tests and phases
    that reached it."""

    seconds: Mapping[str, float]
    contexts: Mapping[str, Mapping[int, Sequence[str]]]

    @cached_property
    def known(self) -> frozenset[str]:
        """The tests with a measurement of their lines."""
        names = {name for lines in self.contexts.values() for found in lines.values() for name in found}
        return frozenset(_parted(name)[0] for name in names)


def read_measured(lines: Path | None, seconds: Path | None, paths: Iterable[Path]) -> Measured:
    """Read the measurements of these files, at any root. Without `lines` no line counts as reached."""
    from coverage import CoverageData

    contexts = dict[str, Mapping[int, Sequence[str]]]()
    if lines is not None:
        data = CoverageData(str(lines))
        data.read()
        for path in {str(path) for path in paths}:
            files = [file for file in data.measured_files() if file == path or file.endswith(f"/{path}")]
            contexts[path] = _joined(data.contexts_by_lineno(file) for file in files)
    rows = [json.loads(line) for line in seconds.read_text(encoding="utf-8").splitlines()] if seconds else []
    return Measured({row[0]: float(row[1]) for row in rows}, contexts)


def _joined(found: Iterable[Mapping[int, Sequence[str]]]) -> dict[int, list[str]]:
    joined = dict[int, list[str]]()
    for contexts in found:
        for line, names in contexts.items():
            joined.setdefault(line, []).extend(names)
    return joined


def choose_tests(
    root: Path,
    fault: Fault,
    place: Place,
    measured: Measured,
    most: int,
    slowest_s: float,
    without: Iterable[str] = (),
) -> list[str]:
    """Return at most `most` tests that may catch the fault (more if they are quick), in the order in which to
    try them.

    First come the files about the fault (its own `tests`, or files that name its module), then the others.
    Within a file, tests that reach it come before tests that share a fixture with one that does, and those
    before tests that were not measured, or any test for a fault outside functions. A file without any
    measurement is tried completely.
    """
    reaching = _reaching(place, measured)
    about = {
        path: rank for path in _test_files(root) if (rank := _aboutness(root, path, fault, place.path)) < 3
    }
    grades = dict[str, tuple[int, int, float]]()
    for test in {*measured.seconds, *reaching} - set(without):
        path = test.partition("::")[0]
        reached = reaching.get(test)
        shares = any(
            other.partition("::")[0] == path and phase == "setup" for other, phase in reaching.items()
        )
        if reached is not None:
            grade = 0
        elif shares:
            grade = 1
        elif path in about and (test not in measured.known or not place.inside):
            grade = 2
        else:
            continue
        if (root / path).exists() and measured.seconds.get(test, UNKNOWN_S) <= slowest_s:
            grades[test] = (about.get(path, 3), grade, measured.seconds.get(test, UNKNOWN_S))
    unmeasured = set(about) - {test.partition("::")[0] for test in measured.seconds}
    grades |= {
        path: (rank, 2, UNKNOWN_S)
        for path, rank in about.items()
        if path in unmeasured and path not in without
    }
    ordered = sorted(grades, key=lambda test: (grades[test], test))
    ordered = [
        test
        for rank in range(4)
        for test in _varied([test for test in ordered if grades[test][0] == rank], rank)
    ]
    together_s = list(itertools.accumulate(measured.seconds.get(test, UNKNOWN_S) for test in ordered))
    return [test for number, test in enumerate(ordered) if number < most or together_s[number] <= QUICK_S]


def _reaching(place: Place, measured: Measured) -> dict[str, str]:
    """Return the phase in which each test reached the fault's lines: "" if unknown, "setup" if in no other
    phase."""
    reaching = dict[str, str]()
    contexts = measured.contexts.get(str(place.path), {})
    for context in (
        {name for line in place.lines for name in contexts.get(line, ()) if "::" in name}
        if place.inside
        else ()
    ):
        test, phase = _parted(context)
        if reaching.get(test, "setup") == "setup":
            reaching[test] = phase
    return reaching


def _parted(context: str) -> tuple[str, str]:
    """Return test and phase of a context; the phase is "" if it was not recorded."""
    test, _, phase = context.rpartition("|")
    return (test, phase) if phase in PHASES else (context, "")


def _test_files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py"))


def _aboutness(root: Path, path: str, fault: Fault, product: Path) -> int:
    """Return 0 for a file that the fault names, 1 for one with its module's name, 2 for one that mentions the
    module, otherwise 3."""
    if path in fault.tests:
        return 0
    if Path(path).stem == f"test_{product.stem}":
        return 1
    module = ".".join(product.with_suffix("").parts)
    text = (root / path).read_text(encoding="utf-8")
    return 2 if any(word in text for word in (f"{module} ", f"{module}.", f"{module}\n", str(product))) else 3


def _varied(tests: Sequence[str], rank: int) -> list[str]:
    """Return the tests in another order: after enough similar ones a test moves to the end. There is no limit
    for a file that the fault names (rank 0), but there is one for the cases of one test."""
    functions, files = Counter[str](), Counter[str]()
    first, later = list[str](), list[str]()
    for test in tests:
        function, path = test.partition("[")[0], test.partition("::")[0]
        functions[function] += 1
        enough = functions[function] > OF_A_FUNCTION or (rank > 0 and files[path] >= OF_A_FILE)
        files[path] += not enough
        (later if enough else first).append(test)
    return first + later
