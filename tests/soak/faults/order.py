"""The order in which tests are tried for a fault, the likeliest first."""

from collections.abc import Iterator
from pathlib import Path

from tests.soak.faults.source import ROOT
from tests.support.changed import distance

MOST = 40  # files


def order_tests(product: Path, caught_last: str) -> Iterator[list[str]]:
    """Yield groups of tests to try for a fault in a file of the product: the test that caught it last; all
    its cases; its file and those named like the faulty file; and at most MOST files that import the faulty
    file, those of its folder first, then the nearest."""
    test = caught_last.partition("[")[0]
    if caught_last:
        yield [caught_last]
    if test != caught_last:
        yield [test]
    files = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    alike = [name for name, path in files.items() if path.stem == f"test_{product.stem}"]
    about = [name for name in dict.fromkeys((test.partition("::")[0], *alike)) if name in files]
    yield about
    imports = {name: distance(path, frozenset({ROOT / product})) for name, path in files.items()}
    elsewhere = {name: path.parent != ROOT / "tests" / product.parent for name, path in files.items()}
    near = sorted((elsewhere[name], steps, name) for name, steps in imports.items() if steps is not None)
    yield [name for *_, name in near if name not in about][:MOST]
