"""Which tests can catch a fault: those that reach its lines, the likeliest and quickest first."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.soak.faults.fault import Fault
from tests.soak.faults.source import Place

PHASES = ("setup", "call", "teardown")
UNKNOWN_S = 5.0  # of a test that nobody has timed
OF_A_FUNCTION, OF_A_FILE = 2, 8  # tests that are tried before the others: cases of one test, tests of one file


@dataclass(frozen=True)
class Measured:
    """What a run under coverage has found: seconds of each test, and by file and line the tests and phases that reached it."""

    seconds: Mapping[str, float]
    contexts: Mapping[str, Mapping[int, Sequence[str]]]


def read_measured(lines: Path | None, seconds: Path | None, paths: Iterable[Path]) -> Measured:
    """Of the files of these paths, wherever they were when they were measured. Without `lines` no line is known to be reached."""
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


def choose_tests(root: Path, fault: Fault, place: Place, measured: Measured, most: int, without: Iterable[str] = ()) -> list[str]:
    """At most so many tests that may catch the fault, in the order in which to try them.

    First those of the files that are about it (the fault's own `tests`, or files that name its module), then the others. Tests
    that reach it come before those that share a fixture with one that does. Of a fault outside functions, and of one that no test
    is known to reach, all tests of the files that are about it.
    """
    reaching = _reaching(place, measured)
    about = {path: rank for path in _test_files(root) if (rank := _aboutness(root, path, fault, place.path)) < 2}
    grades = dict[str, tuple[int, int, float]]()
    for test in {*measured.seconds, *reaching} - set(without):
        path = test.partition("::")[0]
        reached = reaching.get(test)
        shares = any(other.partition("::")[0] == path and phase == "setup" for other, phase in reaching.items())
        if reached is not None:
            grade = 0
        elif shares:
            grade = 1
        elif path in fault.tests or ((not place.inside or not reaching) and path in about):
            grade = 2
        else:
            continue
        if (root / path).exists():
            grades[test] = (about.get(path, 2), grade, measured.seconds.get(test, UNKNOWN_S))
    ordered = sorted(grades, key=lambda test: (grades[test], test))
    return _varied(ordered)[:most] or sorted(about, key=lambda path: about[path])[:most]


def _reaching(place: Place, measured: Measured) -> dict[str, str]:
    """The phase, "" where it is not known, in which each test reached the fault's lines; "setup" if in no other one."""
    reaching = dict[str, str]()
    contexts = measured.contexts.get(str(place.path), {})
    for context in {name for line in place.lines for name in contexts.get(line, ()) if "::" in name} if place.inside else ():
        test, _, phase = context.rpartition("|")
        test, phase = (test, phase) if phase in PHASES else (context, "")
        if reaching.get(test, "setup") == "setup":
            reaching[test] = phase
    return reaching


def _test_files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py"))


def _aboutness(root: Path, path: str, fault: Fault, product: Path) -> int:
    """0 for a file that the fault names or that has its module's name, 1 for one that mentions the module, else 2."""
    if path in fault.tests or Path(path).stem == f"test_{product.stem}":
        return 0
    module = ".".join(product.with_suffix("").parts)
    text = (root / path).read_text(encoding="utf-8")
    return 1 if f"{module} " in text or f"{module}." in text or f"{module}\n" in text or str(product) in text else 2


def _varied(tests: Sequence[str]) -> list[str]:
    """The same tests; those of which enough others alike came before go behind."""
    functions, files = Counter[str](), Counter[str]()
    first, later = list[str](), list[str]()
    for test in tests:
        function, path = test.partition("[")[0], test.partition("::")[0]
        functions[function] += 1
        enough = functions[function] > OF_A_FUNCTION or files[path] >= OF_A_FILE
        files[path] += not enough
        (later if enough else first).append(test)
    return first + later
