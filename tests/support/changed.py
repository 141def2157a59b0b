"""Chooses the tests of a change by imports, for `pytest --changed`.

A test file is chosen if it has changed, or a file that it imports, directly or through others. A string that
names one of our modules ("meshwright.train.main", in tests also "train.main") counts as an import: commands
are started by name. A changed file that is no Python file affects the files that mention its name.
"""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULE = re.compile(r"meshwright(\.\w+)+")
MODULE_IN_TESTS = re.compile(r"(meshwright\.)?(models|parallel|train|tools|tests|benchmarks)(\.\w+)+")


@functools.cache
def changed_files() -> frozenset[Path]:
    """The files with uncommitted changes, those that git does not know yet included; if there are none, the
    files of the last commit."""
    uncommitted = [*_git("diff", "--name-only", "HEAD"), *_git("ls-files", "--others", "--exclude-standard")]
    return frozenset(ROOT / name for name in uncommitted or _git("diff", "--name-only", "HEAD~1"))


def distance(test: Path, changed: frozenset[Path]) -> int | None:
    """How many imports lie between a test file and the nearest of these files; None if it reaches none."""
    conftests = (folder / "conftest.py" for folder in test.parents if folder.is_relative_to(ROOT / "tests"))
    mentioned = tuple(sorted(path.name for path in changed if path.suffix != ".py"))
    layer, seen, steps = {test, *filter(Path.exists, conftests)}, set[Path](), 0
    while layer:
        if layer & changed or any(_mentions(file, mentioned) for file in layer):
            return steps
        seen |= layer
        layer, steps = {file for each in layer for file in imports_of(each)} - seen, steps + 1
    return None


@functools.cache
def imports_of(path: Path) -> frozenset[Path]:
    """The project's files that a file imports or names anywhere, inside functions too."""
    return frozenset(file for name in _names(path) for file in _files_of(name))


def _names(path: Path) -> Iterator[str]:
    module = MODULE_IN_TESTS if path.is_relative_to(ROOT / "tests") else MODULE
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and module.fullmatch(str(node.value)):
            yield str(node.value)


def _files_of(name: str) -> list[Path]:
    path = ROOT.joinpath(*name.removeprefix("meshwright.").split("."))
    return [f for f in (path.with_suffix(".py"), path / "__init__.py", path / "__main__.py") if f.is_file()]


@functools.cache
def _mentions(path: Path, names: tuple[str, ...]) -> bool:
    return any(name in path.read_text(encoding="utf-8") for name in names)


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
