"""Chrome traces as torch's profiler writes them: where a profile's lie, what each says before its events,
checked once, and the events read as a stream: a file of any size in a few megabytes of memory.

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
    """The trace of each profiled rank, by rank: of a run's newest profile, or the one that begins at `step`;
    of a profile's folder; or one file, as rank 0. Raises DataError."""
    if path.is_file():
        return {0: path}
    if not path.is_dir():
        raise DataError(f"{path}: no such run, profile or trace")
    return _in_folder(path) or _of_run(path, step)


def _of_run(run: Path, step: int | None) -> dict[int, Path]:
    folders = {
        int(named[1]): folder
        for folder in run.glob("profile/step-*")
        if (named := _STEP.fullmatch(folder.name))
    }
    found = {first: traces for first, folder in folders.items() if (traces := _in_folder(folder))}
    if not found:
        raise DataError(
            f"{run}: no profile in it. A run makes one with --profile.start=STEP, and with "
            "--profile.all_ranks=true one of every rank"
        )
    if step is not None and step not in found:
        there = ", ".join(map(str, sorted(found)))
        raise DataError(f"{run}: no profile that begins at --step={step}; there is one from step {there}")
    return found[max(found) if step is None else step]


def _in_folder(folder: Path) -> dict[int, Path]:
    named = {int(found[1]): path for path in folder.iterdir() if (found := _RANK.fullmatch(path.name))}
    return dict(sorted(named.items()))


def run_of(trace: Path) -> Path | None:
    """The run's folder, where the trace lies in one."""
    run = trace.absolute().parent.parent.parent
    return run if (run / "plan.yaml").is_file() and (run / "config.yaml").is_file() else None


def find_mesh(trace: Path) -> MeshPlan | None:
    """The mesh of the run in whose folder it lies; None where there is none, or no plan that can be read."""
    run = run_of(trace)
    try:
        return load_plan(run / "plan.yaml").mesh if run else None
    except PlanError:
        return None


RUN, GROUPS = "meshwright", "distributedInfo"  # written by train.profiling, and by torch's profiler
COUNTS = ("rank", "world_size", "local_world_size", "first_step", "steps")
SAME = ("world_size", "first_step")  # in all traces of one profile


def check_header(path: Path, header: Mapping[str, Any]) -> None:
    """Raises DataError for what neither of the two writes."""
    parts = {key: header.get(key) or {} for key in (RUN, GROUPS)}
    for key, part in parts.items():
        _check(path, key, part, isinstance(part, dict), "an object")
    counts = [("baseTimeNanoseconds", header), *((name, part) for part in parts.values() for name in COUNTS)]
    for name, part in counts:
        value = part.get(name, 0)
        _check(path, name, value, type(value) is int and value >= 0, "a whole number")
    groups = parts[GROUPS].get("pg_config") or []
    is_list = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    _check(path, "pg_config", groups, is_list, "a list of objects")


def _check(path: Path, name: str, value: object, right: bool, kind: str) -> None:
    if not right:
        raise DataError(
            f"{path}: {name} is {str(value)[:80]!r} in place of {kind}, as torch's profiler writes it. "
            "Profile again"
        )


def why_apart(facts: Mapping[str, Any], rank: int, shown: Mapping[str, Any]) -> str:
    """Why a rank's trace is not of the same profile as the one shown, by what train.profiling says of both;
    "" if it is."""
    for name in SAME:
        if facts.get(name) != shown.get(name):
            return f"{name} {facts.get(name)}, not {shown.get(name)}"
    world_size = shown.get("world_size")
    return f"no rank of {world_size}" if world_size is not None and rank >= world_size else ""


GZIP_MAGIC = b"\x1f\x8b"
# Names of kernels have been seen with raw control characters in them, which JSON forbids.
_NO_CONTROLS = bytes(range(32)), b" " * 32
# More brackets than this, opened in one chunk and not closed: no trace. ijson notes the way to each, and
# would take all memory.
MOST_OPEN = 1_000


def read_header(path: Path) -> dict[str, Any]:
    """What stands before the events, which is all that torch's profiler says besides them. Raises
    DataError."""
    import ijson

    header = ijson.ObjectBuilder()
    with _opened(path) as text:
        for place, kind, value in ijson.parse(text, use_float=True):
            if (place, kind) == ("traceEvents", "start_array"):
                break
            header.event(kind, value)
    if not isinstance(found := getattr(header, "value", None), dict):
        raise DataError(f"{path}: not a trace: an object was expected. Give another file")
    return found


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Its events in the order of the file. Raises DataError, also in the middle of a file that is cut off
    there."""
    import ijson

    with _opened(path) as text:
        for event in ijson.items(text, "traceEvents.item", use_float=True):
            if not isinstance(event, dict):
                shown = "a list" if isinstance(event, list) else repr(str(event)[:80])
                raise ijson.JSONError(f"{shown} stands in place of an event")
            text.events += 1
            yield event


class _TraceText:
    """The bytes of a trace as a JSON parser takes them: unpacked, in valid UTF-8."""

    def __init__(self, file: io.BufferedReader) -> None:
        packed = file.peek(2)[:2] == GZIP_MAGIC  # by what it holds, not by its name
        unpacked: Any = gzip.GzipFile(fileobj=file) if packed else file
        self._text = io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="replace", newline="")
        self._table = bytes.maketrans(*_NO_CONTROLS)
        self.characters = self.events = 0

    def read(self, size: int) -> bytes:
        text = self._text.read(size)
        self.characters += len(text)
        if sum(map(text.count, "[{")) - sum(map(text.count, "]}")) > MOST_OPEN:
            raise ValueError("nested too deeply")
        return text.encode().translate(self._table)


@contextmanager
def _opened(path: Path) -> Iterator[_TraceText]:
    """The text of a trace. Raises DataError, for whatever is wrong with it, that names the file and the
    place."""
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
            f"{path}: not a whole trace, {_reason(error)} ({place}). Profile again, or give another file"
        ) from None


def _reason(error: Exception) -> str:
    """On one line; ijson shows the text before and behind what is wrong, sometimes as bytes."""
    said = error.args[0] if error.args and isinstance(error.args[0], bytes) else str(error).encode()
    return one_line(said.decode(errors="replace").partition("(right here)")[0]) or type(error).__name__
