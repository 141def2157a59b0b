"""A run's folder as it lies on disk, also while the run is still going: its rows, state, config and plan, and
what they come to in a few figures."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError, one_line
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.yaml_io import YamlError, load_mapping
from meshwright.train.config_parser import known_keys, no_warning, rename_keys
from meshwright.train.errors import ConfigError
from meshwright.train.fault_tolerance.run_status import Status, read_status
from meshwright.train.files import parse_mapping

MAX_LINE_BYTES = 1 << 20  # of a row; ours have less than a thousandth of it
Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """What a run has left so far.

    Args:
        rows: of metrics.jsonl by step, ascending; of a step that was done again the last one
        config: config.yaml with dotted keys; empty where there is none
        plan: None where there is none that can be read, `plan_problem` then says why
        unreadable: lines of metrics.jsonl that are no rows, such as one that is being written
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
        """Steps that were trained and reported."""
        return [step for step, row in self.rows.items() if "loss" in row]


def read_run(folder: Path) -> RunFolder:
    """Read it all; what is not there is empty. Raises ConfigError where the folder is none, or config.yaml is
    not readable."""
    if folder.is_file():
        raise ConfigError(f"{folder} is a file: name the run's folder, such as {folder.parent}")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder. Name a run's folder, such as runs/llama_debug")
    rows, unreadable = read_rows(folder / "metrics.jsonl")
    plan, problem = _read_plan(folder / "plan.yaml")
    return RunFolder(folder, read_status(folder), rows, read_config(folder), plan, problem, unreadable)


def read_rows(path: Path) -> tuple[dict[int, Row], int]:
    """Rows by step, and how many lines, each of bounded length, are no rows; none where there is no such
    file."""
    rows, unreadable = dict[int, Row](), 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                if (row := parse_row(line)) is None:
                    unreadable += 1
                else:
                    rows[row["step"]] = row
    except FileNotFoundError:
        return {}, 0
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    return dict(sorted(rows.items())), unreadable


def read_tail(path: Path, most: int, start: int = 0) -> bytes:
    """Of a file that may be growing its end, from byte `start` on and `most` bytes of it; nothing where it
    cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - most))
            return file.read()
    except OSError:
        return b""


def read_config(folder: Path) -> dict[str, Any]:
    """config.yaml of a run's folder with dotted keys, by their names of today; {} where there is none. Raises
    ConfigError for one that is no YAML."""
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        return rename_keys(flatten(load_mapping(path), whole=known_keys()), str(path), no_warning)
    except YamlError as error:
        raise ConfigError(str(error)) from None


def flatten(mapping: Mapping[str, Any], prefix: str = "", whole: Sequence[str] = ()) -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; a key in `whole` keeps the mapping that is its value, and an
    empty one stays."""
    flat = dict[str, Any]()
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        flat |= (
            flatten(value, f"{name}.", whole)
            if isinstance(value, dict) and value and name not in whole
            else {name: value}
        )
    return flat


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys of two flat configs with both values where these differ. A key that only one of them knows is of
    another version of the program, and no change; unless the other has null in its place."""
    changed = {key: (old[key], new[key]) for key in old if key in new and _differ(old[key], new[key])}
    for here, there, flip in ((old, new, False), (new, old, True)):
        for key, value in here.items():
            parent = key.rpartition(".")[0]
            if key not in there and parent in there and value is not None:
                changed[key] = (there[parent], value) if flip else (value, there[parent])
    return changed


def _differ(a: Any, b: Any) -> bool:
    """Typed, but for numbers: 1 and 1.0 are one value, true and 1 are not."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) != len(b) or any(_differ(x, y) for x, y in zip(a, b, strict=True))
    return (isinstance(a, bool) != isinstance(b, bool)) or a != b


def value_of(row: Row, key: str) -> float | None:
    """A figure of a row: None where it has none, NaN where it was not finite (JSON's null)."""
    if key not in row:
        return None
    value = row[key]
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def series(rows: Mapping[int, Row], key: str) -> dict[int, float]:
    """A figure by step, where rows have it; NaN where it was not finite."""
    return {step: value for step, row in rows.items() if (value := value_of(row, key)) is not None}


def tokens_per_step(run: RunFolder) -> float | None:
    """Tokens of an optimizer step: of plan and config, else of a row's rate and time. None where nothing says
    it."""
    seq_len = run.config.get("train.seq_len")
    if run.plan is not None and isinstance(seq_len, int):
        return float(run.plan.global_batch_size * seq_len)
    for row in run.rows.values():
        rate, time_s = value_of(row, "tokens_per_s"), value_of(row, "step_time_s")
        if rate is not None and time_s is not None and math.isfinite(rate * time_s):
            return float(round(rate * time_s))
    return None


def training_s(rows: Mapping[int, Row]) -> dict[int, float]:
    """Seconds of training up to each reported step: the steps' own time, without start, evaluations and
    checkpoints."""
    times, done_s = dict[int, float](), 0.0
    reported = [step for step, row in rows.items() if math.isfinite(value_of(row, "step_time_s") or math.nan)]
    for before, step in pairwise([0, *reported]):
        done_s += (step - before) * float(rows[step]["step_time_s"])
        times[step] = done_s
    return times


def _read_plan(path: Path) -> tuple[Plan | None, str]:
    if not path.is_file():
        return None, "there is no plan.yaml"
    try:
        return load_plan(path), ""
    except (PlanError, YamlError) as error:
        return None, one_line(error, 300)


def parse_row(line: bytes) -> Row | None:
    """The row that a line of metrics.jsonl holds; None if it is none, such as one that is being written."""
    try:
        row = parse_mapping(line.decode("utf-8"))
    except ValueError:
        return None
    step = row.get("step")
    return row if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


# not counted in rates: compilation, caches and allocators settle in the first ones, as in tools.bench
WARM_UP_STEPS = 4
PREDICTED = ("step_time_s", "peak_memory_gib")  # what the planner predicts, by the names of a row


@dataclass(frozen=True)
class Rate:
    """Median over reports after the warm-up, and half of them lie between `low` and `high` (the
    quartiles)."""

    median: float
    low: float
    high: float
    reports: int

    @property
    def spread(self) -> float:
        """(high - low) / median; 0 where the median is."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Figures:
    """Of one run; None where no row says it, NaN where it was not finite.

    Args:
        step: the last one reported
        loss, eval_loss: the last ones
        tokens_per_s: over all processes
        step_time_s: of an optimizer step
        peak_memory_gib: of the fullest process
        predicted: what a planner has predicted, by the names of `PREDICTED`
    """

    step: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: Rate | None
    step_time_s: Rate | None
    peak_memory_gib: float | None
    mfu: float | None
    predicted: Mapping[str, float]

    def measured(self, name: str) -> float | None:
        """The figure that belongs to a predicted one."""
        if name == "step_time_s":
            return self.step_time_s.median if self.step_time_s else None
        return self.peak_memory_gib

    def error_of(self, name: str) -> float | None:
        """How far what was predicted lies beside what was measured: (predicted - measured) / measured."""
        measured = self.measured(name)
        return self.predicted[name] / measured - 1 if name in self.predicted and measured else None


def number_words(value: float | None, form: str) -> str:
    """As `format` has it; "" where there is none."""
    return "" if value is None else format(value, form) if math.isfinite(value) else "not finite"


def figures_of(run: RunFolder, predicted: Mapping[str, float] | None = None) -> Figures:
    """Of a run's rows. `predicted`: where its own rows say nothing of that."""
    counted = warmed_up(run.rows)
    memory = series(run.rows, "peak_memory_gib")
    own = {
        name: values[max(values)] for name in PREDICTED if (values := series(run.rows, f"predicted_{name}"))
    }
    mfu = [value for value in series(counted, "mfu").values() if math.isfinite(value)]
    return Figures(
        step=max(run.steps, default=0),
        loss=_last(series(run.rows, "loss")),
        eval_loss=_last(series(run.rows, "eval_loss")),
        tokens_per_s=_rate(series(counted, "tokens_per_s")),
        step_time_s=_rate(series(counted, "step_time_s")),
        peak_memory_gib=max((value for value in memory.values() if math.isfinite(value)), default=None),
        mfu=statistics.median(mfu) if mfu else None,
        predicted={**(predicted or {}), **own},
    )


def warmed_up(rows: Mapping[int, Row]) -> dict[int, Row]:
    """Rows whose rates count: without the first report, whose steps include compiling, and the first
    WARM_UP_STEPS steps; all there are where that leaves none."""
    reported = [step for step, row in rows.items() if "step_time_s" in row]
    counted = [step for step in reported[1:] if step > WARM_UP_STEPS] or reported[-1:]
    return {step: rows[step] for step in counted}


def _rate(values: Mapping[int, float]) -> Rate | None:
    finite = sorted(value for value in values.values() if math.isfinite(value))
    if not finite:
        return None
    low, middle, high = (
        statistics.quantiles(finite, n=4, method="inclusive") if len(finite) > 1 else [finite[0]] * 3
    )
    return Rate(middle, low, high, len(finite))


def _last(values: Mapping[int, float]) -> float | None:
    return values[max(values)] if values else None
