"""A run's row in TensorBoard's HParams tab."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Value = bool | float | str
COMPARED = {  # tag -> the column's name: what runs are compared by
    "loss/eval": "loss, eval",
    "loss/train": "loss, train",
    "speed/tokens_per_s_per_gpu": "tokens/s per GPU",
    "memory/peak_gib": "peak memory, GiB",
}


@dataclass(frozen=True)
class HParams:
    """What a run's row says.

    Args:
        values: by the key's name
        first: keys that are shown from the start, five of them in the order of their names; the others when
            they are ticked
    """

    values: Mapping[str, Value]
    first: frozenset[str]


def begin_summaries(hparams: HParams, start_s: float) -> list[Any]:
    """Which columns there are, and the run's row. TensorBoard takes the columns from any one of the runs that
    it shows: so every run names all keys and the same metrics. Of several rows in one folder it takes the
    first."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2  # type: ignore[import-untyped]

    keys = [_column(name, value, name in hparams.first) for name, value in hparams.values.items()]
    metrics = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=words)
        for tag, words in COMPARED.items()
    ]
    experiment = api_pb2.Experiment(hparam_infos=keys, metric_infos=metrics)
    # without a group's name: the run's folder is one
    row = plugin_data_pb2.SessionStartInfo(start_time_secs=start_s)
    for name, value in hparams.values.items():
        setattr(row.hparams[name], f"{_kind(value)}_value", value)
    return [
        _summary(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment)),
        _summary(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=row)),
    ]


def end_summary(outcome: Literal["finished", "failed"], end_s: float) -> Any:
    """How the run of the row has ended."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if outcome == "finished" else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=end_s)
    return _summary(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))


def _kind(value: Value) -> str:
    """As google.protobuf.Value names it."""
    return "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"


def _column(name: str, value: Value, first: bool) -> Any:
    from tensorboard.plugins.hparams import api_pb2

    types = {
        "bool": api_pb2.DATA_TYPE_BOOL,
        "string": api_pb2.DATA_TYPE_STRING,
        "number": api_pb2.DATA_TYPE_FLOAT64,
    }
    # "Differs" over runs, which no single run can know, is what TensorBoard puts first.
    column = api_pb2.HParamInfo(name=name, type=types[_kind(value)], differs=first)
    if isinstance(value, bool):
        column.domain_discrete.extend([False, True])
    return column


def _summary(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.plugins.hparams import metadata

    return Summary(
        value=[
            Summary.Value(
                tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
            )
        ]
    )
