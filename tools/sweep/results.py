"""The results of a sweep, read from its runs' folders, and the variant that wins."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.tools.processes import named_device
from meshwright.tools.run_reader import (
    FIGURES,
    Figures,
    Rate,
    RunFolder,
    figures_of,
    format_number,
    read_run,
    value_text,
)
from meshwright.tools.sweep.runner import OUTPUT
from meshwright.tools.sweep.spec import Spec, SweepRun

NO_FIGURES = Figures(0, None, None, None, None, None, None, {})
LUCK = 0.1  # the highest probability of a winner by chance
# of spec.best: -1, more is better
DIRECTIONS = {"tokens_per_s": -1, "loss": 1, "eval_loss": 1, "peak_memory_gib": 1}


@dataclass(frozen=True)
class RunResult:
    """The current result of a run.

    Args:
        varied: values of the keys that differ between the sweep's runs, as text
        state, reason: waiting, running, finished, stopped, failed or refused, and why
        folder: contents of its folder; None if there is no folder yet
    """

    run: SweepRun
    varied: Mapping[str, str]
    state: str
    reason: str
    device: str
    folder: RunFolder | None
    figures: Figures

    def value(self, best: str) -> float | None:
        """Return the figure that decides; None if the run has not finished, or diverged."""
        value = self.figures.value(best)
        diverged = not all(math.isfinite(each) for each in (self.figures.loss, value) if each is not None)
        return None if self.state != "finished" or diverged else value

    def texts(self) -> dict[str, str]:
        """Return the figures as texts by their titles; "" if there is none."""
        train, texts = self.run.config.train, dict[str, str]()
        for name in ("loss", "eval_loss", "tokens_per_s", "step_time_s", "peak_memory_gib"):
            (label, form), value = FIGURES[name], getattr(self.figures, name)
            texts[label] = rate_text(value, form) if isinstance(value, Rate) else format_number(value, form)
        return {"step": f"{self.figures.step}" + ("" if train.epochs else f"/{train.steps}"), **texts}


@dataclass(frozen=True)
class SweepResults:
    """The current results of a sweep, the best run first; the variant that wins, or None, and why."""

    name: str
    spec: Spec
    runs: tuple[RunResult, ...]
    winner: str | None
    verdict: str


def rate_text(rate: Rate | None, form: str) -> str:
    """Return the median of a rate, and half of its spread if there is more than one report."""
    if rate is None:
        return ""
    return f"{rate.median:{form}}" + (f" ± {rate.spread / 2:.0%}" if rate.reports > 1 else "")


def read_sweep(name: str, spec: Spec, runs: Sequence[SweepRun]) -> SweepResults:
    """Read the current state of every run from its folder."""
    settings = {run.name: run.settings for run in runs}

    def text(run: SweepRun, key: str) -> str:
        return value_text(settings[run.name].get(key))

    own = dict.fromkeys(key for run in runs for key in ("processes", *run.own))
    keys = [key for key in own if len({text(run, key) for run in runs}) > 1]
    results = [read_result(run, {key: text(run, key) for key in keys}) for run in runs]
    sign = DIRECTIONS[spec.best]
    results.sort(key=lambda each: math.inf if (value := each.value(spec.best)) is None else sign * value)
    return SweepResults(name, spec, tuple(results), *find_winner(results, spec.best))


def read_result(run: SweepRun, varied: Mapping[str, str]) -> RunResult:
    """Read the current state of a run from its folder. A run that failed because its plan is not possible is
    refused."""
    folder, output = read_run(run.folder) if run.folder.is_dir() else None, run.folder / OUTPUT
    state, reason = "waiting", ""
    if folder and folder.status:
        state, reason = folder.status.state, folder.status.reason
        state = "refused" if state == "failed" and reason.startswith("PlanError") else state
    device = named_device(output.read_text("utf-8", errors="replace")) if output.is_file() else ""
    return RunResult(run, varied, state, reason, device, folder, figures_of(folder) if folder else NO_FIGURES)


def find_winner(results: Sequence[RunResult], best: str) -> tuple[str | None, str]:
    """Return the variant that wins, if one does, and the reason. Only variants count whose runs have all
    finished with finite figures.

    A variant wins if each of its runs is better than every run of the others, and if that is unlikely to
    happen by chance: with equal variants, every order of all n runs is equally likely, and in one of "n over
    k" orders a variant's k runs are the first k.
    """
    sign, (label, form) = DIRECTIONS[best], FIGURES[best]
    groups = dict[str, list[float]]()
    for each in results:
        value = each.value(best)
        groups.setdefault(each.run.variant, []).append(math.nan if value is None else value)
    values = {variant: runs for variant, runs in groups.items() if not math.isnan(sum(runs))}
    if unfinished := sum(each.state in ("waiting", "running", "stopped") for each in results):
        return None, f"No winner yet: {unfinished} of {len(results)} runs have not finished."
    if len(values) < 2:
        return None, f"No winner: fewer than two variants have {label} of all their runs."
    first, second, *_ = sorted(values, key=lambda variant: sign * statistics.median(values[variant]))
    lead = (
        f"{first} with {label} {_range(values[first], form)}, ahead of {second} with "
        f"{_range(values[second], form)}"
    )
    others = [sign * value for variant, runs in values.items() if variant != first for value in runs]
    if max(sign * value for value in values[first]) >= min(others):
        return None, f"No winner: {lead}. Runs of different variants overlap: the difference may be noise."
    total = sum(map(len, values.values()))
    luck = sum(1 / math.comb(total, len(runs)) for runs in values.values())
    chance = f"If all variants were equal, one would lead like this by chance in {luck:.0%} of sweeps"
    if luck > LUCK:
        return None, f"No winner yet: {lead}. {chance}: repeat the runs (--repeat 3)."
    return first, f"Winner: {lead}. {chance}."


def _range(values: Sequence[float], form: str) -> str:
    """Return a median with its range, such as "5 (4 to 6 in 3 runs)"."""
    median = f"{statistics.median(values):{form}}"
    if len(values) == 1:
        return f"{median} (one run)"
    return f"{median} ({min(values):{form}} to {max(values):{form}} in {len(values)} runs)"


def to_document(results: SweepResults) -> dict[str, Any]:
    """Return the results as a JSON-compatible document."""
    spec, names = results.spec, ("name", "variant", "processes")
    runs = [
        {name: getattr(each.run, name) for name in names}
        | {name: getattr(each, name) for name in ("varied", "state", "reason", "device")}
        | vars(each.figures)
        for each in results.runs
    ]
    head = {"sweep": results.name, "config": spec.config, "folder": spec.folder, "best": spec.best}
    return head | {"winner": results.winner, "verdict": results.verdict, "runs": runs}
