"""A run's TensorBoard files: event files, the tags of a row's figures, the Custom Scalars layout, the HParams
row.

The layout is the same in all runs: TensorBoard joins their layouts, and shows a chart once only if it is the
same in each of them. What was predicted stands beside what is measured.
"""

import io
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.train.metrics.log_file import LogFile, WriteErrors

Value = bool | float | str
COMPARED = {  # tag -> the column's name: what runs are compared by
    "loss/eval": "loss, eval",
    "loss/train": "loss, train",
    "speed/tokens_per_s_per_gpu": "tokens/s per GPU",
    "memory/peak_gib": "peak memory, GiB",
}
CHARTS = {  # category -> chart -> regular expressions of tags, matched at a tag's beginning
    "Overview": {
        "Loss: train and eval": ["loss/(train|eval)$"],
        "Tokens/s per GPU, predicted too": ["speed/tokens_per_s_per_gpu(_predicted)?$"],
        "Peak memory in GiB, predicted too": ["memory/peak_gib(_predicted)?$", "memory/reserved_gib$"],
        "MFU, predicted too": ["speed/mfu(_causal)?(_predicted)?$"],
        "Seconds: step (predicted too), wait for data": ["speed/step_time_s(_predicted)?$", "data/wait_s$"],
        "Gradient norm": ["optimizer/grad_norm$"],
        "Learning rate": ["optimizer/lr$"],
    },
    "More": {
        "Loss of each set": ["eval/.*/loss$"],
        "Bits per byte of each set": ["eval/.*/bits_per_byte$"],
        "Gradient norm of each unit (metrics.gradient_norms)": ["gradient_norm/"],
    },
}
VERSION = "brain.Event:2"  # of the format, which begins every file
PNG_SIZE = slice(16, 24)  # where a PNG has its width and height (https://www.w3.org/TR/png-3/#11IHDR)


@dataclass(frozen=True)
class RunSummary:
    """What TensorBoard shows of a run from its first row on, by name: texts in Markdown, PNG images, made
    when they are needed by the thread that writes, and the run's row in the HParams tab, of which
    `first_hparams` are shown from the start, five of them in the order of their names; the others when they
    are ticked."""

    texts: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    hparams: Mapping[str, Value] = field(default_factory=dict)
    first_hparams: frozenset[str] = frozenset()


class TensorBoardWriter:
    """A TensorBoard event file with all of a row on disk as soon as it is added.

    Not SummaryWriter: its thread dies on a full disk, with a traceback, and makes every later call raise,
    what waited in it lost. Nor anything else of torch.utils.tensorboard: where TensorFlow is installed it
    imports that.
    """

    def __init__(self, folder: Path, trouble: WriteErrors, shown: RunSummary, first_step: int) -> None:
        """All of `shown` but its images is in the file from the first row on. Of files written before, steps
        from `first_step` on are hidden: a resumed run does them again."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]
        from tensorboard.plugins.text.summary_v2 import text_pb  # type: ignore[import-untyped]

        begin = SessionLog(status=SessionLog.START)
        start = [_event(file_version=VERSION), _event(step=first_step, session_log=begin)]
        texts = [text_pb(name, text) for name, text in shown.texts.items()]
        summaries = [_layout(), *_begin_row(shown), *texts]
        start += [_event(summary=summary) for summary in summaries]
        # read in the order of names
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = LogFile(folder / name, trouble, _records(start))

    def add(self, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Add scalars and texts, by tag, of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.plugins.text.summary_v2 import text_pb

        # One event for all scalars: an event each, as SummaryWriter does it, takes three times as long.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._append(step, Summary(value=values), *(text_pb(*text) for text in texts.items()))

    def add_image(self, step: int, name: str, png: bytes) -> None:
        """Add an image, a PNG file's bytes."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = struct.unpack(">II", png[PNG_SIZE])
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._append(step, Summary(value=[Summary.Value(tag=name, image=image)]))

    def close(self) -> None:
        """Try once more to write what waits."""
        self._file.close()

    def _append(self, step: int, *summaries: Any) -> None:
        self._file.append(_records(_event(step=step, summary=summary) for summary in summaries))


def _event(**content: Any) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), **content)


def _records(events: Iterable[Any]) -> bytes:
    """Events in the framing that TensorBoard reads."""
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()


def _layout() -> Any:
    """The charts of the Custom Scalars tab; all but the first category are closed until one opens them."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata  # type: ignore[import-untyped]

    categories = [
        layout_pb2.Category(
            title=title,
            closed=title != next(iter(CHARTS)),
            chart=[
                layout_pb2.Chart(title=chart, multiline=layout_pb2.MultilineChartContent(tag=tags))
                for chart, tags in charts.items()
            ],
        )
        for title, charts in CHARTS.items()
    ]
    layout = layout_pb2.Layout(category=categories).SerializeToString()
    tensor, about = TensorProto(dtype="DT_STRING", string_val=[layout]), metadata.create_summary_metadata()
    return Summary(value=[Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, tensor=tensor, metadata=about)])


def _begin_row(shown: RunSummary) -> list[Any]:
    """Which columns the HParams tab has, and the run's row. TensorBoard takes the columns from any one of the
    runs that it shows: so every run names all keys and the same metrics. Of several rows in one folder it
    takes the first."""
    from google.protobuf.struct_pb2 import Struct  # type: ignore[import-untyped]
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2  # type: ignore[import-untyped]

    if not shown.hparams:
        return []
    types = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    values = Struct()
    values.update(dict(shown.hparams))
    # "Differs" over runs, which no single run can know, is what TensorBoard puts first.
    keys = [
        api_pb2.HParamInfo(
            name=name,
            type=types.get(type(value), api_pb2.DATA_TYPE_FLOAT64),
            differs=name in shown.first_hparams,
        )
        for name, value in shown.hparams.items()
    ]
    metrics = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=words)
        for tag, words in COMPARED.items()
    ]
    # without a group's name: the run's folder is one
    row = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time(), hparams=values.fields)
    return [
        _of_row("experiment", experiment=api_pb2.Experiment(hparam_infos=keys, metric_infos=metrics)),
        _of_row("session_start_info", session_start_info=row),
    ]


def _of_row(name: str, **content: Any) -> Any:
    """A summary of the HParams plugin."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**content))
    value = Summary.Value(tag=f"_hparams_/{name}", metadata=about, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


PREDICTED = "predicted_"  # begins the name of a figure of metrics.jsonl that the planner has predicted
UNIT_NORMS = "unit_grad_norms"
TAGS = {
    "loss": "loss/train",
    "eval_loss": "loss/eval",
    "loss_spike": "loss/spike",
    "grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/lr",
    "skipped_steps": "optimizer/skipped_steps",
    "tokens_per_s": "speed/tokens_per_s",
    "tokens_per_s_per_gpu": "speed/tokens_per_s_per_gpu",
    "mfu": "speed/mfu",
    "mfu_causal": "speed/mfu_causal",
    "step_time_s": "speed/step_time_s",
    "recompiles": "speed/recompiles",
    "peak_memory_gib": "memory/peak_gib",
    "reserved_memory_gib": "memory/reserved_gib",
    "data_wait_s": "data/wait_s",
    "epoch": "data/epoch",
}
# of names that go on with a set or source
GROUPS = {"eval/": "eval/", "epoch/": "data/epoch/", "sequences/": "data/sequences/"}


def tag_of(name: str) -> str:
    """The tag of a figure that has this name in metrics.jsonl; one that nobody has listed is in the group
    other."""
    if name.startswith(PREDICTED):
        return f"{tag_of(name.removeprefix(PREDICTED))}_predicted"  # sorted just behind the measured one
    for prefix, group in GROUPS.items():
        if name.startswith(prefix):
            return group + name.removeprefix(prefix)
    return TAGS.get(name, f"other/{name}")


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by their tags, those of each unit among them; neither the step nor words."""
    scalars = {
        tag_of(name): value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float)
    }
    return scalars | {f"gradient_norm/{unit}": norm for unit, norm in row.get(UNIT_NORMS, {}).items()}
