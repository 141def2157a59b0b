"""A run's TensorBoard files: event files, tags of the metrics, Custom Scalars layout, HParams row.

The layout is the same in all runs: TensorBoard merges the layouts of runs, and shows a chart only once if it
is identical in all of them. Predicted values are in the charts of the measured ones.
"""

import io
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.plugins.custom_scalar import layout_pb2  # type: ignore[import-untyped]
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.text.summary_v2 import text_pb  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from meshwright.train.metrics.collector import PREDICTED, UNIT_NORMS
from meshwright.train.metrics.log_file import LogFile, WriteErrors
from meshwright.train.metrics.run_summary import RunSummary

COMPARED = {  # tag -> column name: the metrics of the HParams tab
    "loss/eval": "loss, eval",
    "loss/train": "loss, train",
    "speed/tokens_per_s_per_gpu": "tokens/s per GPU",
    "memory/peak_gib": "peak memory, GiB",
}
CHARTS = {  # category -> chart -> regular expressions, matched at the start of a tag
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
VERSION = "brain.Event:2"  # format version, the first record of every file
PNG_SIZE = slice(16, 24)  # width and height in a PNG (https://www.w3.org/TR/png-3/#11IHDR)


class TensorBoardWriter(LogFile):
    """A TensorBoard event file that writes each row to disk when it is added.

    SummaryWriter is not used: on a full disk its thread dies with a traceback, waiting rows are lost, and
    every later call raises. Nothing else of torch.utils.tensorboard is used either, because it imports
    TensorFlow if that is installed.
    """

    def __init__(self, folder: Path, errors: WriteErrors, shown: RunSummary, first_step: int) -> None:
        """The file starts with `shown`, except for its images. TensorBoard hides the steps of earlier files
        from `first_step` on, because a resumed run repeats them."""
        begin = SessionLog(status=SessionLog.START)
        start = [_event(file_version=VERSION), _event(step=first_step, session_log=begin)]
        summaries = [_layout(), *_hparams_row(shown), *_texts(shown.texts)]
        start += [_event(summary=summary) for summary in summaries]
        # TensorBoard reads the files in the order of their names
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        super().__init__(folder / name, errors, _records(start))

    def add(self, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Add the scalars and texts of a step, by tag."""
        # One event for all scalars: one event per scalar, as in SummaryWriter, takes three times as long.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(step, Summary(value=values), *_texts(texts))

    def add_image(self, step: int, name: str, png: bytes) -> None:
        """Add an image, given as the bytes of a PNG file."""
        width, height = struct.unpack(">II", png[PNG_SIZE])
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._add(step, Summary(value=[Summary.Value(tag=name, image=image)]))

    def _add(self, step: int, *summaries: Any) -> None:
        self.append(_records(_event(step=step, summary=summary) for summary in summaries))


def _spelled(text: str) -> str:
    """Return the text with escapes for what UTF-8 cannot encode, such as bytes of a path."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _texts(texts: Mapping[str, str]) -> list[Any]:
    return [text_pb(name, _spelled(text)) for name, text in texts.items()]


def _event(**content: Any) -> Any:
    return Event(wall_time=time.time(), **content)


def _records(events: Iterable[Any]) -> bytes:
    """Serialize events in TensorBoard's record format."""
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()


def _layout() -> Any:
    """The charts of the Custom Scalars tab; only the first category is open at first."""
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
    return _plugin_summary(
        layout_metadata.CONFIG_SUMMARY_TAG,
        TensorProto(dtype="DT_STRING", string_val=[layout]),
        layout_metadata.create_summary_metadata(),
    )


def _hparams_row(shown: RunSummary) -> list[Any]:
    """The columns of the HParams tab, and the run's row. TensorBoard takes the columns from any one of the
    runs it shows, so every run lists all keys and the same metrics. If a folder contains several rows, it
    takes the first."""
    if not shown.hparams:
        return []
    hparams = {name: _spelled(v) if isinstance(v, str) else v for name, v in shown.hparams.items()}
    types = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    values = Struct()
    values.update(hparams)
    # TensorBoard shows the keys with differs=True first. A run does not know which keys differ between runs.
    keys = [
        api_pb2.HParamInfo(
            name=name,
            type=types.get(type(value), api_pb2.DATA_TYPE_FLOAT64),
            differs=name in shown.first_hparams,
        )
        for name, value in hparams.items()
    ]
    metrics = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=label)
        for tag, label in COMPARED.items()
    ]
    contents = {
        "experiment": api_pb2.Experiment(hparam_infos=keys, metric_infos=metrics),
        # without a group name: TensorBoard uses the run's folder
        "session_start_info": plugin_data_pb2.SessionStartInfo(
            start_time_secs=time.time(), hparams=values.fields
        ),
    }
    return [
        _plugin_summary(
            f"_hparams_/{name}",
            hparams_metadata.NULL_TENSOR,
            hparams_metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**{name: content})),
        )
        for name, content in contents.items()
    ]


def _plugin_summary(tag: str, tensor: Any, metadata: Any) -> Any:
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


TAGS = {
    "loss": "loss/train",
    "eval_loss": "loss/eval",
    "loss_spike": "loss/spike",
    "usual_loss": "loss/usual",
    "grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/lr",
    "skipped_steps": "optimizer/skipped_steps",
    "tokens_per_s": "speed/tokens_per_s",
    "trained_tokens_per_s": "speed/trained_tokens_per_s",
    "tokens_per_s_per_gpu": "speed/tokens_per_s_per_gpu",
    "mfu": "speed/mfu",
    "mfu_causal": "speed/mfu_causal",
    "step_time_s": "speed/step_time_s",
    "recompiles": "speed/recompiles",
    "peak_memory_gib": "memory/peak_gib",
    "reserved_memory_gib": "memory/reserved_gib",
    "data_wait_s": "data/wait_s",
    "epoch": "data/epoch",
    "data_fetched_mib_per_s": "data/fetched_mib_per_s",
}
# prefixes of names that end with a validation set or a source
GROUPS = {"eval/": "eval/", "epoch/": "data/epoch/", "sequences/": "data/sequences/"}


def tag_of(name: str) -> str:
    """Return the TensorBoard tag of a name in metrics.jsonl; other/NAME for a name that is not listed."""
    if name.startswith(PREDICTED):
        return f"{tag_of(name.removeprefix(PREDICTED))}_predicted"  # sorts directly after the measured one
    for prefix, group in GROUPS.items():
        if name.startswith(prefix):
            return group + name.removeprefix(prefix)
    return TAGS.get(name, f"other/{name}")


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by tag, except the step, with the gradient norm of each unit."""
    scalars = {
        tag_of(name): value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float)
    }
    return scalars | {f"gradient_norm/{unit}": norm for unit, norm in row.get(UNIT_NORMS, {}).items()}
