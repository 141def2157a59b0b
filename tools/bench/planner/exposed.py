"""Exposed communication as tools.trace measures it, against the same step without any communication."""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.tools.bench.harness import spread
from meshwright.tools.bench.train_run import PROG, config_to_record
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import make_environment, python_command, run_to_end
from meshwright.tools.trace.analysis import find_steps
from meshwright.tools.trace.events import TraceEvents, load_store
from meshwright.tools.trace.prefetch import split_step
from meshwright.tools.trace.steps import ProfiledStep
from meshwright.train.config_parser import parse_config

SUMMARY = "exposed communication by tools.trace against a step without communication"
ASKED = 0.1  # the difference that is allowed, of the step's own
DESCRIPTION = (
    "Profile the same steps over gloo, and over torch's fake process group, in which every collective is "
    "over at once, in turn. How much longer a step over gloo takes is what tools.trace should call exposed "
    "communication. The fake group copies its input to its output when a collective is launched; the time of "
    "its launches is taken out of its step. The shape sends much and computes little, and over gloo each "
    "launch waits for its end, so that most of the communication is exposed."
)
EPILOG = (
    "Config keys of train.main are accepted too, as --section.key=value, and win over the shape "
    "measured here."
)
SHAPE = (
    "--config=llama_debug.yaml",
    "--model.dim=512",
    "--model.n_layers=4",
    "--model.ffn_dim=1536",
    "--train.seq_len=128",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=2",
    "--parallel.compile.enabled=false",
    "--parallel.forward_prefetch=0",
    "--parallel.backward_prefetch=0",
    "--parallel.param_dtype=float32",
)


@dataclass(frozen=True)
class ProfileMedians:
    """Medians over the steps of all ranks of one profile, in seconds: the step, what of it is exposed
    communication, and what is idle otherwise: on a CPU, launched and not yet begun; without communication,
    `step_s` is without the launches too, which are `launches_s`."""

    step_s: float
    exposed_s: float
    idle_s: float
    launches_s: float


def add_exposed_options(parser: argparse.ArgumentParser) -> None:
    """The options of `exposed`."""
    add = parser.add_argument
    add("--processes", type=positive, default=2, metavar="N", help="ranks (default 2)")
    add(
        "--rounds",
        type=positive,
        default=5,
        metavar="N",
        help="of a profile over gloo and one without (default 5)",
    )
    add("--steps", type=positive, default=8, metavar="N", help="in each profile (default 8)")
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads of each rank (default 1)")


def measure_exposed(
    options: argparse.Namespace, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Config, figures and a text. Raises BenchError, and what a wrong config raises."""
    keys = [*SHAPE, *overrides, f"--run.threads={options.threads}"]
    config = parse_config(keys, PROG)
    rounds: dict[str, list[ProfileMedians]] = {"gloo": [], "fake": []}
    for number in range(options.rounds):
        for kind in ("gloo", "fake") if number % 2 == 0 else ("fake", "gloo"):
            rounds[kind].append(profile_once(kind, keys, options))
    setup = {name: getattr(options, name) for name in ("processes", "rounds", "steps", "threads")}
    figures = {**setup, "load_average": os.getloadavg()[0], **summarise(rounds["gloo"], rounds["fake"])}
    return config_to_record(config), figures, exposed_text(figures)


def profile_once(kind: str, keys: Sequence[str], options: argparse.Namespace) -> ProfileMedians:
    """Start the ranks, and read their traces."""
    with tempfile.TemporaryDirectory(prefix="meshwright-exposed-") as name:
        folder = Path(name)
        command = [
            *python_command(
                "meshwright.tools.bench.planner.exposed_worker", options.processes, folder / "torchrun"
            ),
            kind,
            name,
            str(options.steps),
            *keys,
        ]
        run_to_end(command, make_environment(options.threads, {}), folder / "log", lambda: None)
        stores = [load_store(path) for path in sorted(folder.glob("rank-*.json.gz"))]
    steps = [(step, launches_ns(store, step)) for store in stores for step in find_steps(store)]
    shares = [split_step(step).ns for step, _ in steps]
    lengths = [step.length_ns - (launches if kind == "fake" else 0) for step, launches in steps]
    columns = (
        lengths,
        [ns["exposed"] for ns in shares],
        [ns["idle"] for ns in shares],
        [launches for _, launches in steps],
    )
    return ProfileMedians(*(statistics.median(column) / 1e9 for column in columns))


def launches_ns(store: TraceEvents, step: ProfiledStep) -> int:
    """How long the operators of c10d that launch collectives take in a step."""
    inside = (launch for launch in store.launches if step.start_ns <= launch.start_ns < step.end_ns)
    return sum(launch.end_ns - launch.start_ns for launch in inside)


def summarise(gloo: Sequence[ProfileMedians], fake: Sequence[ProfileMedians]) -> dict[str, Any]:
    """Medians over the rounds; `difference_s` is of what a round's two profiles differ by, `error` what
    `exposed_s` is off it."""
    longer = [with_it.step_s - without.step_s for with_it, without in zip(gloo, fake, strict=True)]
    exposed_s, difference_s = statistics.median(each.exposed_s for each in gloo), statistics.median(longer)
    error = exposed_s / difference_s - 1
    return {
        "step_s": spread([each.step_s for each in gloo]),
        "fake_step_s": spread([each.step_s for each in fake]),
        "exposed_s": exposed_s,
        "difference_s": difference_s,
        "error": error,
        "idle_s": statistics.median(each.idle_s for each in gloo),
        "within": abs(error) <= ASKED,
        "by_round": [
            {
                "gloo_step_s": a.step_s,
                "fake_step_s": b.step_s,
                "exposed_s": a.exposed_s,
                "idle_s": a.idle_s,
                "fake_launches_s": b.launches_s,
            }
            for a, b in zip(gloo, fake, strict=True)
        ],
    }


def exposed_text(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rounds = [
        (r["gloo_step_s"], r["fake_step_s"], r["gloo_step_s"] - r["fake_step_s"], r["exposed_s"], r["idle_s"])
        for r in figures["by_round"]
    ]
    head = (
        "step over gloo, ms",
        "without, ms",
        "difference, ms",
        "exposed by tools.trace, ms",
        "launched and not begun, ms",
    )
    verdict = f"{figures['error']:+.1%}, {'within' if figures['within'] else 'NOT within'} {ASKED:.0%}"
    compared = (
        f"exposed {figures['exposed_s'] * 1e3:.1f} ms against {figures['difference_s'] * 1e3:.1f} ms "
        f"longer: {verdict}"
    )
    table = format_table(head, [tuple(f"{seconds * 1e3:.1f}" for seconds in row) for row in rounds])
    return "\n".join([table, "", f"{compared} (load average {figures['load_average']:.1f})"])
