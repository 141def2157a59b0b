"""The product's code as faults see it: where a snippet stands, which lines that is, and putting faults in and
out."""

import ast
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.soak.faults.fault import Fault

PRODUCT = ("models", "parallel", "train", "tools", "meshwright")


class FaultError(ValueError):
    """A fault that cannot be put in, or something that it needs is not there."""


@dataclass(frozen=True)
class Place:
    """Where a fault goes: the file, and the lines of the statements it changes, counted from 1. `inside`: of
    a function, so that they run when a test does and not when the file is imported."""

    path: Path
    lines: frozenset[int]
    inside: bool


def product_files(root: Path) -> list[Path]:
    """Every file of the product's code, relative to the root."""
    return sorted(path.relative_to(root) for folder in PRODUCT for path in (root / folder).rglob("*.py"))


def find_places(root: Path, faults: Sequence[Fault]) -> dict[str, Place]:
    """The place of each fault, by name. FaultError with all those whose snippet does not stand exactly once
    in the product, or whose replacement is no Python."""
    texts = {path: (root / path).read_text(encoding="utf-8") for path in product_files(root)}
    places, problems = dict[str, Place](), list[str]()
    for fault in faults:
        found = [path for path, text in texts.items() for _ in range(text.count(fault.found))]
        if len(found) != 1:
            problems.append(
                f"{fault.name}: its snippet stands {len(found)} times: {', '.join(map(str, found))}"
            )
            continue
        try:
            ast.parse(texts[found[0]].replace(fault.found, fault.becomes))
        except SyntaxError as error:
            problems.append(f"{fault.name}: {found[0]}:{error.lineno} would be no Python ({error.msg})")
            continue
        places[fault.name] = _place(found[0], texts[found[0]], fault.found)
    if twice := {fault.name for fault in faults if sum(other.name == fault.name for other in faults) > 1}:
        problems.append(f"named twice: {', '.join(sorted(twice))}")
    if problems:
        raise FaultError("\n".join(problems))
    return places


def _place(path: Path, text: str, snippet: str) -> Place:
    begin = text.index(snippet)
    first = text.count("\n", 0, begin) + 1
    wanted = set(range(first, first + snippet.count("\n") + 1))
    lines, inside = set[int](), False
    for statement, within in _statements(ast.parse(text), False):
        own = _own_lines(statement)
        if own & wanted:
            lines |= own
            inside |= within
    return Place(path, frozenset(lines), inside)


def _statements(node: ast.AST, within: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, and whether it is in a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, within
        yield from _statements(child, within or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def _own_lines(statement: ast.stmt) -> set[int]:
    """Its lines without those of the statements in it: of a compound one, its head."""
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno or statement.lineno
    return set(range(statement.lineno, max(last, statement.lineno) + 1))


@contextmanager
def put_in(root: Path, fault: Fault, place: Place, undo: Path) -> Iterator[None]:
    """The fault is in the code as long as the block lasts. `undo`: a file that has what it takes to restore,
    should this process be killed; `restore` reads it."""
    path = root / place.path
    whole, times = path.read_text(encoding="utf-8"), path.stat()
    undo.parent.mkdir(parents=True, exist_ok=True)
    undo.write_text(json.dumps([str(path), whole, times.st_atime_ns, times.st_mtime_ns]), encoding="utf-8")
    try:
        path.write_text(whole.replace(fault.found, fault.becomes), encoding="utf-8")
        yield
    finally:
        restore(undo)


def restore(undo: Path) -> None:
    """Take out a fault that is still in, with the file's time as it was, by which Python knows its compiled
    code."""
    if not undo.exists():
        return
    path, whole, read_ns, written_ns = json.loads(undo.read_text(encoding="utf-8"))
    Path(path).write_text(whole, encoding="utf-8")
    os.utime(path, ns=(read_ns, written_ns))
    undo.unlink()
