"""The product's code as faults see it: where a snippet occurs, and applying and reverting faults."""

import ast
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.soak.faults.fault import Fault

ROOT = Path(__file__).parents[3]
PRODUCT = ("models", "parallel", "train", "tools", "meshwright")


class FaultError(ValueError):
    """A fault that cannot be put in, or something that it needs is missing."""


@dataclass(frozen=True)
class Place:
    """The place of a fault: the file, relative to the root, and the first line, counted from 1."""

    path: Path
    line: int


def find_places(root: Path, faults: Sequence[Fault]) -> dict[str, Place]:
    """Return the place of each fault, by name. Raises FaultError with all faults whose snippet does not occur
    exactly once in the product, or whose replacement is not valid Python."""
    paths = sorted(path for folder in PRODUCT for path in (root / folder).rglob("*.py"))
    texts = {path.relative_to(root): path.read_text(encoding="utf-8") for path in paths}
    places, problems = dict[str, Place](), list[str]()
    for fault in faults:
        matches = [path for path, text in texts.items() for _ in range(text.count(fault.found))]
        if len(matches) != 1:
            problems.append(
                f"{fault.name}: its snippet occurs {len(matches)} times: {', '.join(map(str, matches))}"
            )
            continue
        text = texts[matches[0]]
        try:
            ast.parse(text.replace(fault.found, fault.becomes))
        except SyntaxError as error:
            problems.append(f"{fault.name}: {matches[0]}:{error.lineno} is not valid Python ({error.msg})")
        places[fault.name] = Place(matches[0], text.count("\n", 0, text.index(fault.found)) + 1)
    if twice := {fault.name for fault in faults if sum(other.name == fault.name for other in faults) > 1}:
        problems.append(f"named twice: {', '.join(sorted(twice))}")
    if problems:
        raise FaultError("\n".join(problems))
    return places


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
