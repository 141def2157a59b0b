"""The product's code as faults see it: where a snippet occurs, which lines that is, and applying and
reverting faults."""

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
    """A fault that cannot be put in, or something that it needs is missing."""


@dataclass(frozen=True)
class Place:
    """The place of a fault: the file, and the lines of the statements that it changes, counted from 1.
    `inside`: in a function, so that the lines run when a test does and not when the file is imported."""

    path: Path
    lines: frozenset[int]
    inside: bool


def product_files(root: Path) -> list[Path]:
    """Return every file of the product's code, relative to the root."""
    return sorted(path.relative_to(root) for folder in PRODUCT for path in (root / folder).rglob("*.py"))


def find_places(root: Path, faults: Sequence[Fault]) -> dict[str, Place]:
    """Return the place of each fault, by name. Raises FaultError with all faults whose snippet does not occur
    exactly once in the product, or whose replacement is not valid Python."""
    texts = {path: (root / path).read_text(encoding="utf-8") for path in product_files(root)}
    places, problems = dict[str, Place](), list[str]()
    for fault in faults:
        matches = [path for path, text in texts.items() for _ in range(text.count(fault.found))]
        if len(matches) != 1:
            problems.append(
                f"{fault.name}: its snippet occurs {len(matches)} times: {', '.join(map(str, matches))}"
            )
            continue
        try:
            ast.parse(texts[matches[0]].replace(fault.found, fault.becomes))
        except SyntaxError as error:
            problems.append(f"{fault.name}: {matches[0]}:{error.lineno} is not valid Python ({error.msg})")
            continue
        places[fault.name] = _place(matches[0], texts[matches[0]], fault.found)
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
    """Yield every statement, and whether it is in a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, within
        yield from _statements(child, within or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def _own_lines(statement: ast.stmt) -> set[int]:
    """Return its lines without those of the statements inside it; of a compound statement, its head."""
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno or statement.lineno
    return set(range(statement.lineno, max(last, statement.lineno) + 1))


@contextmanager
def put_in(root: Path, fault: Fault, place: Place, undo: Path) -> Iterator[None]:
    """Keep the fault in the code within this context. `undo`: a file with what `restore` needs, should this
    process be killed."""
    path = root / place.path
    original, times = path.read_text(encoding="utf-8"), path.stat()
    undo.parent.mkdir(parents=True, exist_ok=True)
    undo.write_text(json.dumps([str(path), original, times.st_atime_ns, times.st_mtime_ns]), encoding="utf-8")
    try:
        path.write_text(original.replace(fault.found, fault.becomes), encoding="utf-8")
        yield
    finally:
        restore(undo)


def restore(undo: Path) -> None:
    """Remove a fault that is still in the code, and restore the file's time, by which Python matches its
    compiled code."""
    if not undo.exists():
        return
    path, original, read_ns, written_ns = json.loads(undo.read_text(encoding="utf-8"))
    Path(path).write_text(original, encoding="utf-8")
    os.utime(path, ns=(read_ns, written_ns))
    undo.unlink()
