"""A run's TensorBoard files."""

import contextlib
import io
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.train.board_hparams import HParams, begin_summaries, end_summary
from meshwright.train.board_layout import layout_summary
from meshwright.train.log_files import LogFile, Trouble

Outcome = Literal["finished", "stopped", "failed"]
VERSION = "brain.Event:2"  # of the format, which begins every file
ENDED = ".ended"  # ends the name of the file that says how the run has ended
BINS = 30  # of a histogram: as many as TensorBoard shows
PNG_SIZE = slice(16, 24)  # where a PNG has its width and height (https://www.w3.org/TR/png-3/#11IHDR)


@dataclass(frozen=True)
class Shown:
    """What TensorBoard shows of a run from its first row on, by name: texts in Markdown, PNG images, made
    when they are needed by the thread that writes, the run's row in the HParams tab, and whether there is an
    MFU to show."""

    texts: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    hparams: HParams | None = None
    mfu: bool = True


class Board:
    """A TensorBoard event file with all of a row on disk as soon as it is added.

    Not SummaryWriter: its thread writes up to two minutes later, all of which a kill loses, and on a full
    disk it dies, prints a traceback, and makes the next call raise.
    """

    def __init__(self, folder: Path, trouble: Trouble, shown: Shown, first_step: int | None) -> None:
        """All of `shown` but its images is in the file from the first row on. Of files written before, steps
        from `first_step` on, if any, are hidden: a resumed run does them again; and it is no longer said how
        the run has ended."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.plugins.text.summary_v2 import text_pb  # type: ignore[import-untyped]

        for ended in folder.glob(f"*{ENDED}"):
            with contextlib.suppress(OSError):
                ended.unlink()
        now_s = time.time()
        hparams = [] if shown.hparams is None else begin_summaries(shown.hparams, now_s)
        summaries = [
            layout_summary(shown.mfu),
            *hparams,
            *(text_pb(name, text) for name, text in shown.texts.items()),
        ]
        start = [Event(wall_time=now_s, file_version=VERSION)]
        if first_step is not None:
            start.append(
                Event(wall_time=now_s, step=first_step, session_log=SessionLog(status=SessionLog.START))
            )
        start += [Event(wall_time=now_s, summary=summary) for summary in summaries]
        # read in the order of names
        name = f"events.out.tfevents.{now_s:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path, self._trouble = folder / name, trouble
        self._file = LogFile(self._path, trouble, _records(start))

    def add(
        self,
        step: int,
        scalars: Mapping[str, float],
        texts: Mapping[str, str],
        spreads: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Add scalars, texts, and of `spreads` histograms, by tag, of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.plugins.text.summary_v2 import text_pb
        from torch.utils.tensorboard.summary import histogram

        # One event for all scalars: an event each, as SummaryWriter does it, takes three times as long.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        arrays = {name: np.array(numbers) for name, numbers in (spreads or {}).items() if numbers}
        # Not numpy's "auto" bins: one number far from the others makes billions of them.
        spread = [histogram(name, a, np.linspace(a.min(), a.max(), BINS + 1)) for name, a in arrays.items()]
        self._append(
            step, [Summary(value=values), *spread, *(text_pb(name, text) for name, text in texts.items())]
        )

    def add_image(self, step: int, name: str, png: bytes) -> None:
        """Add an image, a PNG file's bytes."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = struct.unpack(">II", png[PNG_SIZE])
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._append(step, [Summary(value=[Summary.Value(tag=name, image=image)])])

    def end(self, outcome: Outcome) -> None:
        """Say how the run has ended, in a file of its own, for TensorBoard believes the first that says so,
        and a resumed run must be able to take it back. A run that was stopped goes on, some time: it has not
        ended."""
        from tensorboard.compat.proto.event_pb2 import Event

        if outcome != "stopped":
            now_s = time.time()
            end = [
                Event(wall_time=now_s, file_version=VERSION),
                Event(wall_time=now_s, summary=end_summary(outcome, now_s)),
            ]
            LogFile(self._path.with_name(f"{self._path.name}{ENDED}"), self._trouble, _records(end)).append(
                b""
            )

    def close(self) -> None:
        """Try once more to write what waits; and write what every file begins with, where there was no
        row."""
        self._file.append(b"")
        self._file.close()

    def _append(self, step: int, summaries: Iterable[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._file.append(
            _records(Event(wall_time=time.time(), step=step, summary=summary) for summary in summaries)
        )


def _records(events: Iterable[Any]) -> bytes:
    """Events in the framing that TensorBoard reads."""
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()
