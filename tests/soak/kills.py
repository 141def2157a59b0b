"""kill -9 of random ranks at random moments of training and of saving, and what is lost: `python -m
tests.soak.kills -h`."""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.support.harness import make_document, write_record
from benchmarks.train import config_to_record
from meshwright.tools.cli import natural, positive, run_tool
from meshwright.train.config_parser import parse_config
from tests.soak.killed_run import Joined, Kill, KilledRun, Mesh, Phase, Wanted, make_reference
from tests.support.launch import EAGER, TINY, write_text

RECORDS = Path(__file__).parent / "records"

DESCRIPTION = (
    "Train a tiny Llama that saves every other step, kill a random rank at a random moment of training or of "
    "a save, wait until the others have ended, verify every checkpoint, and start the same command again; "
    "repeat until the run's end, then start another run, until there are enough kills. Loss and gradient "
    "norm of every step must equal those of an uninterrupted run, bit for bit. Four of five kills are of "
    "FSDP, the fifth of FSDP x TP with twice as many processes, forked from one that has imported torch. On "
    "two cores a kill takes about two seconds."
)
EPILOG = (
    "Config keys of train.main are accepted too, as --section.key=value, and win over those of the tiny "
    "model."
)
TRAINING = (*TINY, *EAGER, "--checkpoint.every=2", "--metrics.tensorboard=false", "--train.eval_every=0")
TP_EVERY = 5  # every fifth kill is one of FSDP x TP


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.kills", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False
    )
    for name, kind, default, text in (
        ("--training", natural, 50, "kills at moments of training"),
        ("--saving", natural, 50, "kills at moments of a save"),
        ("--seed", natural, 0, "of the moments and ranks"),
        ("--processes", positive, 2, "processes of FSDP; FSDP x TP has twice as many"),
        ("--steps", positive, 40, "optimizer steps of a run"),
    ):
        parser.add_argument(
            name, type=kind, default=default, metavar="N", help=f"{text} (default %(default)s)"
        )
    parser.add_argument(
        "--asynchronous",
        choices=("both", "true", "false"),
        default="both",
        help="how it saves (default both)",
    )
    parser.add_argument("--record", action="store_true", help="write tests/soak/records/DATE-kills.json too")
    return parser


def measure_kills(
    options: argparse.Namespace, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config and figures. Raises BenchError, and what a wrong config raises."""
    rng = random.Random(options.seed)
    ways = {"both": (False, True), "true": (True,), "false": (False,)}[options.asynchronous]
    todo = deal(make_wanted(options.training, options.saving, ways, rng), options.processes)
    with tempfile.TemporaryDirectory(prefix="meshwright-kills-") as name:
        keys = [*TRAINING, *write_text(Path(name)), f"--train.steps={options.steps}", *overrides]
        config = parse_config(keys)
        joined = [
            run for mesh, wanted in todo.items() for run in kill_runs(mesh, wanted, keys, rng, Path(name))
        ]
    setup = {"seed": options.seed, "processes": {mesh.name: mesh.processes for mesh in todo}}
    figures = {**setup, **summarise(joined), "rows": [asdict(kill) for run in joined for kill in run.kills]}
    return config_to_record(config), figures


def make_wanted(training: int, saving: int, ways: Sequence[bool], rng: random.Random) -> list[Wanted]:
    """Return this many kills of each phase, alternating between the ways to save, in random order."""
    phases: list[tuple[Phase, int]] = [("training", training), ("saving", saving)]
    wanted = [
        Wanted(phase, way)
        for phase, count in phases
        for way in itertools.islice(itertools.cycle(ways), count)
    ]
    rng.shuffle(wanted)
    return wanted


def deal(wanted: Sequence[Wanted], processes: int) -> dict[Mesh, list[Wanted]]:
    """Assign every TP_EVERY-th kill to FSDP x TP, the others to FSDP."""
    others = [one for number, one in enumerate(wanted, 1) if number % TP_EVERY]
    meshes = {
        Mesh("FSDP", processes): others,
        Mesh("FSDP x TP", 2 * processes, ("--parallel.tp=2",)): list(wanted[TP_EVERY - 1 :: TP_EVERY]),
    }
    return {mesh: ones for mesh, ones in meshes.items() if ones}


def kill_runs(
    mesh: Mesh, wanted: Sequence[Wanted], keys: Sequence[str], rng: random.Random, folder: Path
) -> list[Joined]:
    """Run on one mesh until every kill has been made. Kills that a run ended before are left to the next
    run."""
    name = f"{mesh.processes}-processes"
    reference, left, joined = (
        make_reference(mesh, keys, folder / f"{name}-whole"),
        list(wanted),
        list[Joined](),
    )
    while left:
        joined.append(KilledRun(mesh, keys, reference, rng, folder / f"{name}-{len(joined)}").run(left))
        left = left[len(joined[-1].kills) :]
        print(
            f"{mesh.name}: run {len(joined)}, {len(joined[-1].kills)} kills, {joined[-1].wrong_steps} wrong "
            f"steps; {len(left)} kills to come",
            file=sys.stderr,
            flush=True,
        )
    return joined


def summarise(joined: Sequence[Joined]) -> dict[str, Any]:
    """Return counts over all kills, the seconds until the other ranks had ended, and whether nothing was
    lost."""
    kills = [kill for run in joined for kill in run.kills]
    damaged, wrong_steps = sum(len(kill.damaged) for kill in kills), sum(run.wrong_steps for run in joined)
    resumed_right, ended_s = sum(kill.resumed_right for kill in kills), [kill.ended_s for kill in kills]
    return {
        "kills": len(kills),
        "runs": len(joined),
        "by_kind": _count_kinds(kills),
        "in_save": sum(kill.in_save for kill in kills),
        "half_written": sum(kill.half_written for kill in kills),
        "resumed_at_last_commit_plus_1": resumed_right,
        "damaged_checkpoints": damaged,
        "steps_compared": sum(run.steps for run in joined),
        "wrong_steps": wrong_steps,
        "ended_s": {"median": statistics.median(ended_s), "worst": max(ended_s)} if kills else None,
        "all_right": resumed_right == len(kills) and not damaged and not wrong_steps,
    }


def _count_kinds(kills: Sequence[Kill]) -> dict[str, int]:
    """Return the number of kills of each kind, such as `FSDP, training, asynchronous`."""
    kinds = [
        f"{kill.mesh}, {kill.phase}, {'' if kill.asynchronous else 'not '}asynchronous" for kill in kills
    ]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def main() -> None:
    """Measure, print the JSON document, and record it if requested."""
    options, overrides = make_parser().parse_known_args()
    config, figures = measure_kills(options, overrides)
    document = make_document("tests.soak.kills", sys.argv[1:], config, figures)
    print(json.dumps(document, indent=2))
    if options.record:
        print(f"recorded: {write_record(document, 'kills', RECORDS)}", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
