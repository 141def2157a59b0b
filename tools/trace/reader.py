"""Chrome traces as torch's profiler writes them: where a profile's lie, what each says besides its events,
checked once, and the events read as a stream: a file of any size in a few megabytes of memory.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from meshwright.parallel.errors import PlanError
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
    _check_count(path, "baseTimeNanoseconds", header)
    for key in (RUN, GROUPS):
        part = header.get(key) or {}
        if not isinstance(part, dict):
            raise _wrong(path, key, part, "an object")
        for name in COUNTS:
            _check_count(path, name, part)
    groups = (header.get(GROUPS) or {}).get("pg_config") or []
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise _wrong(path, "pg_config", groups, "a list of objects")


def _check_count(path: Path, name: str, part: Mapping[str, Any]) -> None:
    value = part.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(path, name, value, "a whole number")


def _wrong(path: Path, name: str, value: object, kind: str) -> DataError:
    return DataError(
        f"{path}: {name} is {str(value)[:80]!r} in place of {kind}, as torch's profiler writes it. Profile "
        "again"
    )


def why_apart(facts: Mapping[str, Any], rank: int, shown: Mapping[str, Any]) -> str:
    """Why a rank's trace is not of the same profile as the one shown, by what train.profiling says of both;
    "" if it is."""
    for name in SAME:
        if facts.get(name) != shown.get(name):
            return f"{name} {facts.get(name)}, not {shown.get(name)}"
    world_size = shown.get("world_size")
    return f"no rank of {world_size}" if world_size is not None and rank >= world_size else ""


EVENTS = "traceEvents"
CHUNK_CHARS = 1 << 20
LONGEST_CHARS = 1 << 26  # of one event or of one key's value: what is longer is no trace
GZIP_MAGIC = b"\x1f\x8b"
# names of kernels have been seen with raw control characters in them
_DECODER = json.JSONDecoder(strict=False)
_BETWEEN = re.compile(r"[\s,]*")


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Its events in the order of the file. Raises DataError, also in the middle of a file that is cut off
    there."""
    return Trace(path).events()


class Trace:
    """One pass over a trace: `header` has what has been passed so far, so all of it once `events` is at its
    end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self._events = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events. Raises DataError that names the file and the place."""
        try:
            with _open(self.path) as file:
                yield from self._document(_Window(file))
        except (OSError, EOFError, zlib.error) as error:
            raise self._broken(str(error) or type(error).__name__) from None
        except _BrokenError as error:
            raise self._broken(str(error)) from None

    def _document(self, window: "_Window") -> Iterator[dict[str, Any]]:
        """The object at the top; or, as older tools write them, a bare list of events."""
        if window.take() == "[":
            yield from self._list(window)
            return
        window.back()
        window.expect("{")
        while (sign := window.take()) != "}":
            window.back()
            key = window.value()
            if sign != '"' or not isinstance(key, str):
                raise _BrokenError(f"a key was expected at character {window.place:,}")
            window.colon()
            if key == EVENTS:
                window.expect("[")
                yield from self._list(window)
            else:
                self.header[key] = window.value()

    def _list(self, window: "_Window") -> Iterator[dict[str, Any]]:
        while window.take() != "]":
            window.back()
            event = window.value()
            if not isinstance(event, dict):
                raise _BrokenError(f"an event was expected before character {window.place:,}")
            self._events += 1
            yield event

    def _broken(self, why: str) -> DataError:
        place = f"after {self._events:,} events"
        return DataError(
            f"{self.path}: not a whole trace, {why} ({place}). Profile again, or give another file"
        )


class _BrokenError(Exception):
    """What is wrong, and where."""


class _Window:
    """A part of the text that moves on; `place` counts characters from the start of the file."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at, self._before, self._ended = file, "", 0, 0, False

    @property
    def place(self) -> int:
        return self._before + self._at

    def take(self) -> str:
        """The next sign that is no space or comma."""
        while (found := _BETWEEN.match(self._text, self._at)) and found.end() == len(self._text):
            self._at = len(self._text)
            if not self._more():
                raise _BrokenError(f"it ends at character {self.place:,}, in the middle of it")
        assert found is not None
        self._at = found.end() + 1
        return self._text[self._at - 1]

    def back(self) -> None:
        self._at -= 1

    def expect(self, sign: str) -> None:
        if (found := self.take()) != sign:
            raise _BrokenError(f"{found!r} stands at character {self.place - 1:,} in place of {sign!r}")

    def colon(self) -> None:
        self.expect(":")
        self.take()  # there is a value behind it, and it is in the window
        self.back()

    def value(self) -> Any:
        """The value that begins here. Reads on until it is whole: one that ends with the window may be the
        start of another."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except ValueError as error:
                if len(self._text) - self._at > LONGEST_CHARS or not self._more():
                    raise _BrokenError(_what(error, self._before)) from None
                continue
            except RecursionError:
                raise _BrokenError(f"nested too deeply at character {self.place:,}") from None
            if end < len(self._text) or not self._more():
                self._at = end
                return value

    def _more(self) -> bool:
        """Read on, as much as is there and still needed again, so that a long value costs a few readings;
        False at the end."""
        kept = self._text[self._at :]
        chunk = self._file.read(max(CHUNK_CHARS, len(kept)))
        self._before += self._at
        self._text, self._at = kept + chunk, 0
        return bool(chunk)


def _what(error: ValueError, before: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {before + error.pos:,}"
    return str(error)


def _open(path: Path) -> TextIO:
    """By what it holds, not by its name."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
    opened: Any = gzip.open(path) if packed else path.open("rb")  # noqa: SIM115  # the caller closes it
    return io.TextIOWrapper(io.BufferedReader(opened), encoding="utf-8-sig", errors="replace")
