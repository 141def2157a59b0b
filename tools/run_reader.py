"""Read a run's folder, also while the run is in progress: rows of metrics.jsonl, status, config and plan,
and summary figures of them."""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError, one_line
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.yaml_io import YamlError, load_mapping
from meshwright.train.config_keys import leaves
from meshwright.train.errors import ConfigError
from meshwright.train.fault_tolerance.run_folder import Status, read_status
from meshwright.train.files import parse_mapping

MAX_LINE_BYTES = 1 << 20  # of a row; real rows have less than a thousandth of that
Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run's folder.

    Args:
        rows: rows of metrics.jsonl by step, ascending; for a step that was repeated, its last row
        config: config.yaml with dotted keys; empty without a config.yaml
        plan: the plan; None if it cannot be read, for the reason in `plan_problem`
        unreadable: number of lines of metrics.jsonl that are not rows, such as a partially written one
    """

    folder: Path
    status: Status | None
    rows: Mapping[int, Row]
    config: Mapping[str, Any]
    plan: Plan | None
    plan_problem: str
    unreadable: int

    @property
    def steps(self) -> list[int]:
        """Steps with a reported training loss."""
        return [step for step, row in self.rows.items() if "loss" in row]


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder; a missing file counts as empty. Raises ConfigError if the folder does not exist,
    or metrics.jsonl or config.yaml cannot be read."""
    if folder.is_file():
        raise ConfigError(f"{folder} is a file: give the run's folder, such as {folder.parent}")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder: give a run's folder, such as runs/llama_debug")
    rows, unreadable = read_rows(folder / "metrics.jsonl")
    plan, problem = None, "" if (folder / "plan.yaml").is_file() else "no plan.yaml"
    if not problem:
        try:
            plan = load_plan(folder / "plan.yaml")
        except (PlanError, YamlError) as error:
            problem = one_line(error, 300)
    return RunFolder(folder, read_status(folder), rows, read_config(folder), plan, problem, unreadable)


def read_rows(path: Path) -> tuple[dict[int, Row], int]:
    """Return the rows of metrics.jsonl by step and the number of lines that are not rows, such as a partially
    written one; lines are read up to MAX_LINE_BYTES. A missing file has no rows. Raises ConfigError if the
    file cannot be read."""
    rows, unreadable = dict[int, Row](), 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                try:
                    row = parse_mapping(line.decode("utf-8"))
                except ValueError:
                    row = {}
                step = row.get("step")
                if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
                    rows[step] = row
                else:
                    unreadable += 1
    except FileNotFoundError:
        return {}, 0
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    return dict(sorted(rows.items())), unreadable


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.yaml of a run's folder with dotted keys; {} without the file. Raises ConfigError if it is
    not valid YAML."""
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        return dict(leaves(load_mapping(path)))
    except YamlError as error:
        raise ConfigError(str(error)) from None


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ between two flat configs, with both values. A key that only one
    config has comes from another version of the program and does not count, unless the other config has
    null for its parent."""
    changed = {key: (old[key], new[key]) for key in old if key in new and _differ(old[key], new[key])}
    for config, other_config, swapped in ((old, new, False), (new, old, True)):
        for key, value in config.items():
            parent = key.rpartition(".")[0]
            if key not in other_config and parent in other_config and value is not None:
                changed[key] = (other_config[parent], value) if swapped else (value, other_config[parent])
    return changed


def _differ(a: Any, b: Any) -> bool:
    """Whether two values differ. Types count, except among numbers: 1 equals 1.0, but true is not 1."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) != len(b) or any(_differ(x, y) for x, y in zip(a, b, strict=True))
    return (isinstance(a, bool) != isinstance(b, bool)) or a != b


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Describe changed config keys; run.dir is omitted."""
    return [
        f"{key}: {value_text(a)} -> {value_text(b)}" for key, (a, b) in changes.items() if key != "run.dir"
    ]


def value_text(value: Any) -> str:
    """Format a YAML value on one line, even one that is not valid in a config."""
    return value if isinstance(value, str) else json.dumps(value)


def value_of(row: Row, key: str) -> float | None:
    """Return a figure of a row: None if the row lacks it or it is not a number, NaN if it was not finite
    (null in JSON)."""
    if key not in row:
        return None
    value = row[key]
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def series(rows: Mapping[int, Row], key: str) -> dict[int, float]:
    """Return a figure by step, for the rows that have it; NaN where it was not finite."""
    return {step: value for step, row in rows.items() if (value := value_of(row, key)) is not None}


def tokens_per_step(run: RunFolder) -> float | None:
    """Return the tokens per optimizer step, from plan and config or else from the rate and time of a row;
    None if neither is available."""
    seq_len = run.config.get("train.seq_len")
    if run.plan is not None and isinstance(seq_len, int):
        return float(run.plan.global_batch_size * seq_len)
    for row in run.rows.values():
        rate, time_s = value_of(row, "tokens_per_s"), value_of(row, "step_time_s")
        if rate is not None and time_s is not None and math.isfinite(rate * time_s):
            return float(round(rate * time_s))
    return None


def training_s(rows: Mapping[int, Row]) -> dict[int, float]:
    """Return the cumulative training time in seconds at each reported step: the step times alone, without
    startup, evaluation and checkpoints."""
    times, total_s = dict[int, float](), 0.0
    reported = [step for step, row in rows.items() if math.isfinite(value_of(row, "step_time_s") or math.nan)]
    for previous, step in pairwise([0, *reported]):
        total_s += (step - previous) * float(rows[step]["step_time_s"])
        times[step] = total_s
    return times


# excluded from rates, as in benchmarks.train: compilation, caches and allocators settle in these steps
WARM_UP_STEPS = 4
PREDICTED = ("step_time_s", "peak_memory_gib")  # figures that the planner predicts, as named in a row


@dataclass(frozen=True)
class Rate:
    """The median of a figure over the reports after warm-up; `low` and `high` are the quartiles."""

    median: float
    low: float
    high: float
    reports: int

    @property
    def spread(self) -> float:
        """(high - low) / median; 0 if the median is 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Figures:
    """Summary figures of a run; None if no row has the figure, NaN if it was not finite.

    Args:
        step: last reported step
        loss, eval_loss: last reported values
        tokens_per_s: over all processes
        step_time_s: seconds per optimizer step
        peak_memory_gib: of the process that uses most
        mfu: model FLOPs utilization, the median after warm-up
        predicted: what the planner predicted, by the names in `PREDICTED`
    """

    step: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: Rate | None
    step_time_s: Rate | None
    peak_memory_gib: float | None
    mfu: float | None
    predicted: Mapping[str, float]

    def value(self, name: str) -> float | None:
        """Return a figure by its name; of a rate, the median."""
        value: float | Rate | None = getattr(self, name)
        return value.median if isinstance(value, Rate) else value


FIGURES = {  # name -> label and format
    "step": ("last step", ",.0f"),
    "loss": ("loss", ".4f"),
    "eval_loss": ("eval loss", ".4f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "step_time_s": ("step time (s)", ".4g"),
    "peak_memory_gib": ("peak memory (GiB)", ",.2f"),
    "mfu": ("MFU", ".1%"),
}


def format_number(value: float | None, form: str) -> str:
    """Format a number; "" for None, "not finite" for NaN and infinity."""
    return "" if value is None else format(value, form) if math.isfinite(value) else "not finite"


def figures_of(run: RunFolder) -> Figures:
    """Summarize a run's rows. Rates are of the rows without the first report, which includes compilation, and
    without the first WARM_UP_STEPS steps; of the last report if none remains."""
    reported = [step for step, row in run.rows.items() if "step_time_s" in row]
    counted = [step for step in reported[1:] if step > WARM_UP_STEPS] or reported[-1:]
    rows = {step: run.rows[step] for step in counted}
    loss, eval_loss = (next(reversed(series(run.rows, key).values()), None) for key in ("loss", "eval_loss"))
    predicted = {name: [*series(run.rows, f"predicted_{name}").values()] for name in PREDICTED}
    memory = series(run.rows, "peak_memory_gib").values()
    mfu = [value for value in series(rows, "mfu").values() if math.isfinite(value)]
    return Figures(
        step=max(run.steps, default=0),
        loss=loss,
        eval_loss=eval_loss,
        tokens_per_s=_rate(series(rows, "tokens_per_s")),
        step_time_s=_rate(series(rows, "step_time_s")),
        peak_memory_gib=max((value for value in memory if math.isfinite(value)), default=None),
        mfu=statistics.median(mfu) if mfu else None,
        predicted={name: values[-1] for name, values in predicted.items() if values},
    )


def _rate(values: Mapping[int, float]) -> Rate | None:
    finite = sorted(value for value in values.values() if math.isfinite(value))
    if not finite:
        return None
    low, middle, high = (
        statistics.quantiles(finite, n=4, method="inclusive") if len(finite) > 1 else [finite[0]] * 3
    )
    return Rate(middle, low, high, len(finite))
