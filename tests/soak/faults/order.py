"""The order in which tests are tried for a fault, the likeliest first."""

from pathlib import Path

from tests.soak.faults.fault import Fault
from tests.soak.faults.source import ROOT
from tests.support.changed import distance


def order_tests(fault: Fault, product: Path, caught_last: str, most: int) -> list[list[str]]:
    """Return groups of tests to try: the test that caught the fault last, with that test's other cases; the
    files about the fault; and the files that import the faulty file, the nearest first, at most `most`."""
    known, _, _ = caught_last.partition("[")
    files = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    about = [
        path
        for path in dict.fromkeys((known.partition("::")[0], *fault.tests, *files))
        if path in files and (path in (*fault.tests, known.partition("::")[0]) or _is_about(path, product))
    ]
    imports = {
        path: distance(files[path], frozenset({ROOT / product})) for path in files if path not in about
    }
    importing = sorted((steps, path) for path, steps in imports.items() if steps is not None)
    groups = [[caught_last], [known], about, [path for _, path in importing[:most]]]
    return [group for number, group in enumerate(groups) if group != [""] and group not in groups[:number]]


def _is_about(path: str, product: Path) -> bool:
    return Path(path).stem == f"test_{product.stem}"
