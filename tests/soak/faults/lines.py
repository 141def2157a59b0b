"""Which lines of the product no test has reached, by file, in a record; and what one record has lost since
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
    """The short name of a checkout's last commit."""
    shown = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return shown.stdout.strip()


def to_lines(root: Path, measured: Path) -> Lines:
    """The record of what `coverage` has measured: of each file how many statements it has, and which ones
    nothing has run.

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
    path.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def compare_lines(root: Path, new: Lines, old: Lines) -> Iterator[str]:
    """What there is less of than in an older record: files of which fewer lines are covered, and lines that
    lost their last test.

    A line that was changed since has none to lose. `root` knows both commits.
    """
    for path, file in new["files"].items():
        if (before := old["files"].get(path)) is None:
            continue
        if file["covered"] < before["covered"]:
            now, then = (f"{one['covered']} of {one['statements']}" for one in (file, before))
            yield f"{path}: {now} lines covered, before {then}"
        if file["missing"]:
            was, is_now = (_text(root, record["commit"], path) for record in (old, new))
            for line in lost_lines(was, is_now, numbers(before["missing"]), numbers(file["missing"])):
                yield f"{path}:{line}: lost its last test: {is_now[line - 1].strip()}"
    if gone := sorted(set(old["files"]) - set(new["files"])):
        yield f"no longer there: {', '.join(gone)}"


def lost_lines(
    was: list[str], is_now: list[str], missing_then: Iterable[int], missing_now: Iterable[int]
) -> list[int]:
    """Of the lines, counted from 1, that nothing runs now, those that are as they were and that something ran
    then."""
    then, same = set(missing_then), dict[int, int]()
    for old, new, size in difflib.SequenceMatcher(None, was, is_now, autojunk=False).get_matching_blocks():
        same |= {new + place: old + place for place in range(1, size + 1)}
    return [line for line in sorted(missing_now) if line in same and same[line] not in then]


def to_words(lines: Iterable[int]) -> str:
    """Numbers in ascending order, as `3, 5-7`."""
    runs = list[list[int]]()
    for line in lines:
        if runs and line == runs[-1][-1] + 1:
            runs[-1].append(line)
        else:
            runs.append([line])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def numbers(words: str) -> list[int]:
    """The numbers again."""
    ends = [[int(end) for end in part.split("-")] for part in words.split(",") if part.strip()]
    return [line for first, *last in ends for line in range(first, (last or [first])[0] + 1)]


def _text(root: Path, commit: str, path: str) -> list[str]:
    shown = subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=root, capture_output=True, text=True, check=False
    )
    if shown.returncode:
        raise FaultError(f"{path} of {commit} is not known here: {shown.stderr.strip()}")
    return shown.stdout.splitlines()
