"""A record of the lines of the product that no test has reached, by file, and what one record has lost since
another."""

import difflib
import json
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.soak.faults.source import FaultError, product_files

WHAT = "lines that no test of a run under coverage has run, ranks and child processes included"

Lines = Mapping[str, Any]  # a record of lines, as JSON has it


def commit_of(root: Path) -> str:
    """Return the short name of a checkout's last commit."""
    shown = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return shown.stdout.strip()


def to_lines(root: Path, measured: Path) -> Lines:
    """Return the record of what `coverage` has measured: for each file the number of its statements, and the
    lines that were never run.

    root: the checkout that was measured, or one of the same commit; measured: coverage's data.
    """
    from coverage import Coverage, CoverageData

    data = CoverageData(str(measured))
    data.read()
    if not (known := data.measured_files()):
        raise FaultError(f"{measured} has no lines")
    report, files = Coverage(data_file=None, config_file=False), dict[str, Any]()
    for path in product_files(root):
        ran = {
            line
            for file in known
            if file == str(path) or file.endswith(f"/{path}")
            for line in data.lines(file) or ()
        }
        report.get_data().add_lines({str(root / path): ran})
        _, statements, _, missing, _ = report.analysis2(str(root / path))
        if statements:
            covered = len(statements) - len(missing)
            files[str(path)] = {
                "statements": len(statements),
                "covered": covered,
                "missing": to_words(missing),
            }
    versions = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "coverage": version("coverage"),
    }
    sums = {name: sum(file[name] for file in files.values()) for name in ("statements", "covered")}
    return {
        "what": WHAT,
        "commit": commit_of(root),
        "date": str(date.today()),
        "versions": versions,
        **sums,
        "files": files,
    }


def write_lines(lines: Lines, path: Path) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def compare_lines(root: Path, new: Lines, old: Lines) -> Iterator[str]:
    """Yield what an older record has more of: files with more covered lines, and lines that lost their last
    test.

    Changed lines do not count as lost. `root` contains both commits.
    """
    for path, file in new["files"].items():
        if (before := old["files"].get(path)) is None:
            continue
        if file["covered"] < before["covered"]:
            now, then = (f"{counts['covered']} of {counts['statements']}" for counts in (file, before))
            yield f"{path}: {now} lines covered, before {then}"
        if file["missing"]:
            was, is_now = (_text(root, record["commit"], path) for record in (old, new))
            for line in lost_lines(was, is_now, numbers(before["missing"]), numbers(file["missing"])):
                yield f"{path}:{line}: lost its last test: {is_now[line - 1].strip()}"
    if removed := sorted(set(old["files"]) - set(new["files"])):
        yield f"removed: {', '.join(removed)}"


def lost_lines(
    was: list[str], is_now: list[str], missing_then: Iterable[int], missing_now: Iterable[int]
) -> list[int]:
    """Return the lines, counted from 1, that are not run now, but are unchanged and were run then."""
    then, same = set(missing_then), dict[int, int]()
    for old, new, size in difflib.SequenceMatcher(None, was, is_now, autojunk=False).get_matching_blocks():
        same |= {new + place: old + place for place in range(1, size + 1)}
    return [line for line in sorted(missing_now) if line in same and same[line] not in then]


def to_words(lines: Iterable[int]) -> str:
    """Return ascending numbers as text, such as `3, 5-7`."""
    runs = list[list[int]]()
    for line in lines:
        if runs and line == runs[-1][-1] + 1:
            runs[-1].append(line)
        else:
            runs.append([line])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def numbers(text: str) -> list[int]:
    """Return the numbers of such a text."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part.strip()]
    return [line for first, *last in ends for line in range(first, (last or [first])[0] + 1)]


def _text(root: Path, commit: str, path: str) -> list[str]:
    shown = subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=root, capture_output=True, text=True, check=False
    )
    if shown.returncode:
        raise FaultError(f"{path} of {commit} is not in this repository: {shown.stderr.strip()}")
    return shown.stdout.splitlines()
