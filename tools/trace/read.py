"""A Chrome trace as torch's profiler writes it, read as a stream: a file of any size in a few megabytes of
memory.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from meshwright.train.errors import DataError

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
