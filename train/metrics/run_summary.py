"""The summary of a run: its first log lines, and the texts, image and hyperparameters in TensorBoard."""

import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import torch

from meshwright import __version__
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.lint import advise, unused_keys
from meshwright.parallel.plan.mistakes import planned_keys
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.parallel.plan.strategy import describe_strategy
from meshwright.train.config import Config, TrainingJob
from meshwright.train.config_keys import keys_of, type_of
from meshwright.train.config_parser import config_to_yaml
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.resolve import describe_dtype
from meshwright.train.planning.run_plan import RunPlan
from meshwright.train.training import describe_frozen, describe_plan

if TYPE_CHECKING:
    from meshwright.parallel.planner.timeline import Timeline

Value = bool | float | str
PREDICTED_STEP = "predicted_step"  # name of the image
SECTIONS = ("model", "parallel", "data", "optim", "train")  # sections whose keys are hyperparameters
DEFAULT_COLUMNS = frozenset({"optim.lr", "train.micro_batch_size"}) | {
    f"parallel.{name}" for name in ("activation_checkpoint", "dp_shard", "cp", "tp")
}


@dataclass(frozen=True)
class RunSummary:
    """What TensorBoard shows of a run from the first row on, by name: Markdown; functions that return a PNG,
    called by the writing thread; the run's row in the HParams tab. `first_hparams`: those whose columns are
    shown at first, five of them in the order of their names; the user ticks the others."""

    texts: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    hparams: Mapping[str, Value] = field(default_factory=dict)
    first_hparams: frozenset[str] = frozenset()


def describe_run(config: Config, planned: RunPlan, data: str, steps: range) -> RunSummary:
    """Return the summary for TensorBoard: config, plan, and the step predicted by the planner. `data`: a
    description of the data; `steps`: steps of this process."""
    plan, device_name, prediction = planned.plan, planned.device_name, planned.prediction
    facts = run_facts(config.job, plan, device_name, data, steps)
    texts = {
        "config": _code(config_to_yaml(config)),
        "plan": _code(plan_to_yaml(plan)),
        # a list: on a narrow page the columns of a table are one character wide
        "about": "\n".join(f"- **{name}**: {fact}" for name, fact in facts.items()),
    }
    images = {}
    if prediction:
        texts["planner"] = "\n".join(f"- {line}" for line in prediction.reasons)
        title = prediction.title(Path(str(config.run.dir)).name, device_name)
        images = {PREDICTED_STEP: partial(_draw, prediction.timeline, title)}
    values = hparams_of(config, plan, device_name)
    return RunSummary(texts, images, values, first_keys(values, sys.argv[1:]))


def run_facts(job: TrainingJob, plan: Plan, device_name: str, data: str, steps: range) -> dict[str, str]:
    """Return one line each on model, data, training, hardware and software, by label."""
    model, mesh, tokens = model_of(job.model), plan.mesh, plan.global_batch_size * job.seq_len
    python, axes = platform.python_version(), " x ".join(f"{a} {getattr(mesh, a)}" for a in mesh.axes)
    return {
        "Model": f"{model.parameters:,} parameters in {len(model.units.checkpointed)} layers",
        "Data": data,
        "Training": f"{len(steps):,} steps of {tokens:,} tokens, to step {steps.stop - 1:,}: "
        f"{len(steps) * tokens:,} tokens",
        "Hardware": f"{mesh.world_size} x {device_name}: {axes}",
        "Software": f"meshwright {__version__}, torch {torch.__version__}, Python {python}",
    }


def hparams_of(config: Config, plan: Plan, device_name: str) -> dict[str, Value]:
    """Return the hyperparameters of a run by config key, with the plan's value where the plan decides it."""
    values = {
        name: _plain(value, type_of(name))
        for section in SECTIONS
        for name, value in keys_of(getattr(config, section), section)
    }
    del values["data.cache_dir"]
    open_keys = {key: planned for key, planned in planned_keys(plan).items() if isinstance(values[key], str)}
    return {
        **values,
        **{key: _summarize(planned) for key, planned in open_keys.items()},
        "train.global_batch_size": plan.global_batch_size,
        "run.seed": config.run.seed,
        "run.device": device_name,
        "run.processes": plan.mesh.world_size,
    }


def first_keys(values: Mapping[str, Value], arguments: Sequence[str]) -> frozenset[str]:
    """Return the keys to show first: those on the command line, where a sweep sets the keys it varies;
    otherwise DEFAULT_COLUMNS."""
    given = {
        argument.removeprefix("--").partition("=")[0] for argument in arguments if argument.startswith("--")
    }
    return frozenset(given & values.keys()) or DEFAULT_COLUMNS & values.keys()


def _plain(value: Any, declared: Any) -> Value:
    """Return the value of a bool or number key unchanged, so that runs can be sorted by it; else its text."""
    is_number = declared in (bool, int, float) or get_origin(declared) is Annotated  # with bounds
    return value if is_number else _to_text(value)


def _to_text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return ", ".join(map(_to_text, value)) if isinstance(value, list | tuple) else str(value)


def _summarize(planned: Sequence[Any]) -> Value:
    """Return the plan's value for a key, a number unchanged; that of most units with its count."""
    if len(planned) == 1:
        return planned[0] if type(planned[0]) in (int, float) else _to_text(planned[0])
    (most, count), *others = Counter(map(_to_text, planned)).most_common()
    return f"{most} ({count} of {len(planned)} units)" if others else most


def _draw(timeline: "Timeline", title: str) -> bytes:
    from meshwright.parallel.planner.timeline_plot import draw_timeline, to_png

    return to_png(draw_timeline(timeline, title))


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def log_run_summary(console: Console, ranks: RankInfo, planned: RunPlan, config: Config) -> None:
    """Print the first log lines of a run: versions, device, model, plan, saves."""
    job, run_dir, every = config.job, config.run.dir, config.checkpoint.every
    plan, plural = planned.plan, "es" if ranks.world_size > 1 else ""
    console.print(f"meshwright {__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    console.print(
        f"device: {planned.device_name}, {ranks.world_size} process{plural}, {torch.get_num_threads()} CPU "
        "threads each"
    )
    console.print_lines([describe_dtype(planned.device)] if job.parallel.param_dtype == "auto" else [])
    console.print(f"model: {model_of(job.model).parameters:,} parameters{describe_frozen(job)}")
    # rows of a CPU have the peak of the process, which is several times this for a small model
    amount = "at most" if planned.bounded else "about"
    bound = " (a bound: there is ample)" if planned.bounded else ""
    tensors = f"memory: {amount} {(planned.peak_bytes or 0) / GIB:.2f} GiB of tensors per process{bound}"
    console.print(f"no prediction: {why}" if (why := planned.no_prediction) else tensors)
    if job.parallel.strategy:
        console.print(describe_strategy(job.parallel.strategy, plan.mesh))
    console.print(describe_plan(job, plan))
    if plan.mesh.tp > 1 and (share := model_of(job.model).units.tp_share) < 1:
        console.print(f"tp={plan.mesh.tp} splits {share:.0%} of the parameters; every tp rank has all others")
    if job.parallel.plan != "auto":  # the planner has already considered what advice would suggest
        console.print_lines(
            f"advice: {line}" for line in (*advise(plan, ranks.local_world_size), *unused_keys(job.parallel))
        )
    written = {"tb/": config.metrics.tensorboard, "checkpoints/": config.checkpoint.every}
    names = ["config.yaml", "plan.yaml", "metrics.jsonl", *(name for name, given in written.items() if given)]
    console.print(f"run: {run_dir} ({', '.join(names)})")
    steps = f"every {every} steps, at a stop and at the end" if every > 0 else "at a stop and at the end"
    console.print(f"saves: {steps if every else 'none, because checkpoint.every is 0: no weights are kept'}")
    reasons = planned.prediction.reasons if planned.prediction else ()
    console.print_lines(f"planner: {line}" for line in reasons)
