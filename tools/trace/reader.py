"""Read Chrome traces as torch's profiler writes them: find a profile's files, validate their headers, and
stream their events, so that a file of any size takes a few megabytes of memory.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import io
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError, one_line
from meshwright.parallel.plan.schema import MeshPlan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.train.errors import DataError

_RANK = re.compile(r"rank-(\d+)\.json(\.gz)?")
_STEP = re.compile(r"step-(\d+)")


def find_traces(path: Path, step: int | None) -> dict[int, Path]:
    """Return the trace of each profiled rank, by rank: of a run's newest profile or the one that starts at
    `step`, of a profile's folder, or of one file (as rank 0). Raises DataError."""
    if path.is_file():
        return {0: path}
    if not path.is_dir():
        raise DataError(f"{path}: no such run, profile or trace: give the folder of a run or a trace file")
    return _in_folder(path) or _of_run(path, step)


def _of_run(run: Path, step: int | None) -> dict[int, Path]:
    folders = {
        int(match[1]): folder
        for folder in run.glob("profile/step-*")
        if (match := _STEP.fullmatch(folder.name))
    }
    profiles = {first: traces for first, folder in folders.items() if (traces := _in_folder(folder))}
    if not profiles:
        raise DataError(
            f"{run} contains no profile: start the run with --profile.start=STEP (and "
            "--profile.all_ranks=true for every rank)"
        )
    if step is not None and step not in profiles:
        available = ", ".join(map(str, sorted(profiles)))
        raise DataError(f"{run}: no profile starts at --step={step}: use one of {available}")
    return profiles[max(profiles) if step is None else step]


def _in_folder(folder: Path) -> dict[int, Path]:
    traces = {int(match[1]): path for path in folder.iterdir() if (match := _RANK.fullmatch(path.name))}
    return dict(sorted(traces.items()))


def run_of(trace: Path) -> Path | None:
    """Return the run's folder; None if the trace is not in one."""
    run = trace.absolute().parent.parent.parent
    return run if (run / "plan.yaml").is_file() and (run / "config.yaml").is_file() else None


def find_mesh(trace: Path) -> MeshPlan | None:
    """Return the mesh of the run whose folder contains the trace; None without a run or a valid plan."""
    run = run_of(trace)
    try:
        return load_plan(run / "plan.yaml").mesh if run else None
    except PlanError:
        return None


RUN, GROUPS = "meshwright", "distributedInfo"  # written by train.profiling, and by torch's profiler
COUNTS = ("rank", "world_size", "local_world_size", "first_step", "steps")
SAME = ("world_size", "first_step")  # identical in all traces of one profile


def check_header(path: Path, header: Mapping[str, Any]) -> None:
    """Raise DataError for values that neither train.profiling nor torch's profiler writes."""
    parts = {key: header.get(key) or {} for key in (RUN, GROUPS)}
    for key, part in parts.items():
        _check(path, key, part, isinstance(part, dict), "an object")
    counts = [("baseTimeNanoseconds", header), *((name, part) for part in parts.values() for name in COUNTS)]
    for name, part in counts:
        value = part.get(name, 0)
        _check(path, name, value, type(value) is int and value >= 0, "an integer")
    groups = parts[GROUPS].get("pg_config") or []
    is_list = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    _check(path, "pg_config", groups, is_list, "a list of objects")


def _check(path: Path, name: str, value: object, valid: bool, kind: str) -> None:
    if not valid:
        raise DataError(
            f"{path}: {name} is {str(value)[:80]!r}, but torch's profiler writes {kind}: profile again"
        )


def find_difference(facts: Mapping[str, Any], rank: int, shown: Mapping[str, Any]) -> str:
    """Return the difference between a rank's trace and the one shown, in the facts that train.profiling
    recorded in both; "" if both belong to the same profile."""
    for name in SAME:
        if facts.get(name) != shown.get(name):
            return f"{name} {facts.get(name)}, not {shown.get(name)}"
    world_size = shown.get("world_size")
    exists = world_size is None or rank < world_size
    return "" if exists else f"rank {rank} does not exist at world_size {world_size}"


GZIP_MAGIC = b"\x1f\x8b"
# Kernel names sometimes contain raw control characters, which JSON forbids.
_NO_CONTROLS = bytes(range(32)), b" " * 32
# A trace never opens more brackets than this in one chunk without closing them. ijson stores the path to
# each, which would exhaust the memory.
MAX_OPEN = 1_000


def read_header(path: Path) -> dict[str, Any]:
    """Return the keys before the events, all that torch's profiler writes besides. Raises DataError."""
    import ijson

    header = ijson.ObjectBuilder()
    with _opened(path) as text:
        for place, kind, value in ijson.parse(text, use_float=True):
            if (place, kind) == ("traceEvents", "start_array"):
                break
            header.event(kind, value)
    if not isinstance(content := getattr(header, "value", None), dict):
        raise DataError(f"{path}: not a trace: it does not contain a JSON object: give another file")
    return content


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in the order of the file. Raises DataError; for a truncated file, after the events
    that it contains."""
    import ijson

    with _opened(path) as text:
        for event in ijson.items(text, "traceEvents.item", use_float=True):
            if not isinstance(event, dict):
                shown = "a list" if isinstance(event, list) else repr(str(event)[:80])
                raise ijson.JSONError(f"{shown} instead of an event")
            text.events += 1
            yield event


class _TraceText:
    """The bytes of a trace for the JSON parser: decompressed and valid UTF-8."""

    def __init__(self, file: io.BufferedReader) -> None:
        packed = file.peek(2)[:2] == GZIP_MAGIC  # by its content, not its name
        unpacked: Any = gzip.GzipFile(fileobj=file) if packed else file
        self._text = io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="replace", newline="")
        self._table = bytes.maketrans(*_NO_CONTROLS)
        self.characters = self.events = 0

    def read(self, size: int) -> bytes:
        """Return the next `size` characters, encoded. Raises ValueError for text nested too deeply."""
        text = self._text.read(size)
        self.characters += len(text)
        if sum(map(text.count, "[{")) - sum(map(text.count, "]}")) > MAX_OPEN:
            raise ValueError("nested too deeply")
        return text.encode().translate(self._table)


@contextmanager
def _opened(path: Path) -> Iterator[_TraceText]:
    """Open the text of a trace. Any failure to read it raises DataError with the file and the position."""
    import ijson

    place, text = "at its start", None
    try:
        with path.open("rb") as file:
            text = _TraceText(file)
            yield text
    except (OSError, EOFError, zlib.error, ValueError, ijson.JSONError) as error:
        if text:
            place = f"before character {text.characters:,}, after {text.events:,} events"
        raise DataError(
            f"{path}: unreadable trace: {_reason(error)} ({place}): profile again, or give another file"
        ) from None


def _reason(error: Exception) -> str:
    """Return the error on one line; ijson quotes the surrounding text, sometimes as bytes."""
    message = error.args[0] if error.args and isinstance(error.args[0], bytes) else str(error).encode()
    return one_line(message.decode(errors="replace").partition("(right here)")[0]) or type(error).__name__
