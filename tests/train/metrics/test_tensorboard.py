"""TensorBoard's page, read by TensorBoard's own code: tags, charts, texts, images, and rows of the HParams
tab."""

import dataclasses
import io
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2

from meshwright.parallel.planner.hardware import load_hardware
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.metrics.run_summary import RunSummary, describe_run, first_keys, hparams_of
from meshwright.train.metrics.tensorboard import CHARTS, COMPARED, TAGS
from meshwright.train.metrics.writer import RowWriter
from meshwright.train.planning.predict import predict
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.run_plan import RunPlan
from tests.support.launch import EAGER, TINY
from tests.support.metrics import log_losses, open_rows
from tests.support.worlds import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # from TensorBoard's copy of html5lib
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
    from tensorboard.plugins.hparams import backend_context, list_session_groups
    from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin

STATUSES = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
CPU = "CPU (no GPU)"


class Page:
    """The page that TensorBoard's own code shows for a folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.runs = (
            EventMultiplexer(size_guidance={"tensors": 0, "scalars": 0})
            .AddRunsFromDirectory(str(folder))
            .Reload()
        )
        self.context = TBContext(
            logdir=str(folder),
            data_provider=MultiplexerDataProvider(self.runs, str(folder)),
            plugin_name_to_instance={},
        )

    def layout(self) -> dict[str, Any]:
        return json.loads(CustomScalarsPlugin(self.context).layout_impl(RequestContext(), ""))

    def lines(self, run: str, expression: str) -> set[str]:
        """Tags that a chart with this expression shows."""
        self.context.plugin_name_to_instance["scalars"] = ScalarsPlugin(self.context)
        return set(
            CustomScalarsPlugin(self.context).scalars_impl(RequestContext(), run, expression, "")[
                "tag_to_events"
            ]
        )

    def hparams(self) -> tuple[Any, dict[str, Any]]:
        """The columns, and the rows by name."""
        plugin = backend_context.Context(self.context)
        request = api_pb2.ListSessionGroupsRequest(allowed_statuses=STATUSES, slice_size=100)
        groups = list_session_groups.Handler(RequestContext(), plugin, "", request).run().session_groups
        empty = list_session_groups.provider.ListHyperparametersResult(hyperparameters=[], session_groups=[])
        content = plugin.hparams_metadata(RequestContext(), "")
        columns = plugin.experiment_from_metadata(RequestContext(), "", True, content, empty)
        return columns, {group.name: group for group in groups}


def board_of(folder: Path, shown: RunSummary, steps: range, loss: float = 1.0) -> None:
    """Write a run, or a part of one, with an evaluation at each of `steps`."""
    rows = open_rows(folder, shown=shown)
    log_losses(rows, dict.fromkeys(steps, loss))
    rows.close()


def with_lr(lr: float) -> RunSummary:
    values = {"optim.lr": lr, "parallel.plan": "manual", "data.packing": True, "train.steps": 10.0}
    return RunSummary({"config": "a: 1"}, {}, values, frozenset({"optim.lr"}))


def test_every_chart_finds_the_tags_that_rows_have_and_no_others(tmp_path: Path) -> None:
    predicted = ("step_time_s", "peak_memory_gib", "tokens_per_s_per_gpu", "mfu")
    figures = [*TAGS, *(f"predicted_{name}" for name in predicted)]
    row = dict.fromkeys(figures, 1.0) | {"step": 1, "eval/a/loss": 1.0, "eval/a/bits_per_byte": 1.0}
    rows = open_rows(tmp_path)
    rows.on_report(row | {"unit_grad_norms": {"head": 1.0, "layers.0": math.nan}})
    rows.close()
    page = Page(tmp_path)
    shown = {category["title"]: category for category in page.layout()["category"]}
    assert list(shown) == list(CHARTS)
    assert [category["closed"] for category in shown.values()] == [False, True]
    lines = {
        chart["title"]: set().union(*(page.lines("tb", tag) for tag in chart["multiline"]["tag"]))
        for category in shown.values()
        for chart in category["chart"]
    }
    assert list(lines.values()) == [
        {"loss/train", "loss/eval"},
        {"speed/tokens_per_s_per_gpu", "speed/tokens_per_s_per_gpu_predicted"},
        {"memory/peak_gib", "memory/peak_gib_predicted", "memory/reserved_gib"},
        {"speed/mfu", "speed/mfu_causal", "speed/mfu_predicted"},
        {"speed/step_time_s", "speed/step_time_s_predicted", "data/wait_s"},
        {"optimizer/grad_norm"},
        {"optimizer/lr"},
        {"eval/a/loss"},
        {"eval/a/bits_per_byte"},
        {"gradient_norm/head", "gradient_norm/layers.0"},
    ]


def test_runs_are_rows_that_compare_and_a_resumed_run_is_one(tmp_path: Path) -> None:
    """With all its steps, and a chart that runs share is shown once."""
    for name, lr, steps in (("a", 0.5, range(3)), ("b", 0.25, range(3)), ("a", 0.5, range(2, 4))):
        board_of(tmp_path / name, with_lr(lr), steps, loss=lr)
    page = Page(tmp_path)
    columns, rows = page.hparams()
    assert {
        name: (row.hparams["optim.lr"].number_value, len(row.sessions)) for name, row in rows.items()
    } == {
        "a/tb": (0.5, 1),
        "b/tb": (0.25, 1),
    }
    assert rows["a/tb"].hparams["parallel.plan"].string_value == "manual"
    assert rows["a/tb"].hparams["data.packing"].bool_value
    assert {name: row.metric_values[0].value for name, row in rows.items()} == {"a/tb": 0.5, "b/tb": 0.25}
    assert [metric.name.tag for metric in columns.metric_infos] == list(COMPARED)
    assert columns.hparam_infos[0].name == "optim.lr", "the requested key comes first"
    assert len(page.layout()["category"][0]["chart"]) == len(CHARTS["Overview"])
    assert [event.step for event in page.runs.Tensors("a/tb", "loss/eval")] == list(range(4))


@pytest.fixture(scope="module")
def config() -> Config:
    return parse_config([*TINY, *EAGER, "--parallel.tp=2", "--run.dir=runs/tiny"])


def test_a_run_shows_config_plan_and_the_predicted_step(config: Config, tmp_path: Path) -> None:
    plan = plan_run(config.job, 2)
    prediction = predict(config.job, plan, load_hardware()["cpu"], 2)
    prediction = dataclasses.replace(prediction, reasons=("tp=2: faster",))
    planned = RunPlan(torch.device("cpu"), CPU, plan, 0, prediction=prediction)
    board_of(tmp_path / "run", describe_run(config, planned, "1,000 tokens", range(1, 351)), range(2))
    page = Page(tmp_path)
    texts = {
        name: page.runs.Tensors("run/tb", name)[0].tensor_proto.string_val[0].decode()
        for name in ("about", "config", "plan", "planner")
    }
    assert "n_layers: 2" in texts["config"]
    for fact in ("350 steps of 256 tokens", "1,000 tokens", f"2 x {CPU}", "tp 2", "2 layers"):
        assert fact in texts["about"]
    assert texts["planner"] == "- tp=2: faster"
    (image,) = page.runs.Tensors("run/tb", "predicted_step")
    width, height, png = image.tensor_proto.string_val
    assert Image.open(io.BytesIO(png)).size == (int(width), int(height))
    assert int(width) > 2000
    _, rows = page.hparams()
    assert rows["run/tb"].hparams["parallel.tp"].number_value == 2


def test_the_row_says_what_the_plan_is_where_the_config_leaves_it_open(config: Config) -> None:
    values = hparams_of(config, plan_run(config.job, 4), CPU)
    assert (values["parallel.dp_shard"], values["parallel.tp"], values["train.micro_batch_size"]) == (2, 2, 2)
    assert values["parallel.activation_checkpoint"] == "none"
    assert values["parallel.reshard_after_forward"] == "true (3 of 4 units)"
    assert values["optim.betas"] == "0.9, 0.95"
    assert values["run.processes"] == 4
    assert first_keys(values, ["--config=a", "--train.steps=5", "--run.dir=x"]) == {"train.steps"}
    assert first_keys(values, ["--run.dir=x"]) >= {"optim.lr", "parallel.tp"}


def write_beside_tensorflow(folder: Path) -> set[str]:
    """Write a row where TensorFlow is installed; return what was imported of it, or imports it."""
    (folder / "tensorflow.py").touch()
    sys.path.insert(0, str(folder))
    for name in ("torch.utils.tensorboard", "meshwright.train.metrics.tensorboard"):
        sys.modules.pop(name, None)  # so that it is imported here
    rows = RowWriter(folder, True, RunSummary({"config": "a: 1"}, {}, {"optim.lr": 0.5}), pytest.fail)
    rows.on_report({"step": 0, "loss": 1.0})
    rows.close()
    return {"tensorflow", "torch.utils.tensorboard"} & sys.modules.keys()


def test_tensorflow_is_not_imported_where_it_is_installed(tmp_path: Path) -> None:
    """Importing it takes seconds and GPU memory."""
    assert run_ranks(1, write_beside_tensorflow, tmp_path) == [set()]
    assert len(list((tmp_path / "tb").iterdir())) == 1
