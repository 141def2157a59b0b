"""`python -m tools.sweep SPEC.yaml`: runs that differ in a few keys, one after another, and a page that
compares them."""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.parallel.errors import one_line
from meshwright.tools.cli import EXIT_INTERRUPTED, positive, run_tool, to_json
from meshwright.tools.plan.export import write_whole
from meshwright.tools.sweep.html_report import make_page
from meshwright.tools.sweep.preflight import PlannedRun, changed_runs, check_sweep, refuse_changed
from meshwright.tools.sweep.progress import SweepScreen
from meshwright.tools.sweep.results import SweepReport, read_sweep, report_json
from meshwright.tools.sweep.runner import (
    Attempt,
    hear_interrupts,
    launched_with,
    make_folder,
    note_owner,
    own_folder,
    refuse_nodes,
    refuse_other_owner,
    run_command,
    run_once,
    slurm_command,
    state_of,
    write_attempt,
)
from meshwright.tools.sweep.spec import Spec, read_spec
from meshwright.train.config_parser import RENAMED_KEYS, known_keys, near_key, rename_keys, warn_once
from meshwright.train.errors import ConfigError

EXIT_NOT_ALL = 1  # not every run has finished
STUDIES = Path(__file__).resolve().parents[2] / "configs" / "experiments"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for. Raises ConfigError, PlanError, DataError and LockError."""
    options = make_parser().parse_args(arguments)
    path = find_spec(options.spec)
    given = {key: getattr(options, key) for key in ("config", "processes", "nodes", "folder")}
    spec = read_spec(
        path,
        {key: value for key, value in given.items() if value is not None},
        read_overrides(options.override),
    )
    refuse_other_owner(spec.folder, path.stem)
    printing = options.slurm or options.dry_run
    planned = check_sweep(spec, here=not (printing or options.report))
    changed = changed_runs(planned, launched_with)
    if options.report:
        report = write_report(path.stem, spec, planned, changed)
        print(to_json(report_json(report)) if options.json else _where(spec))
        return
    refuse_changed(changed, spec.folder)
    if printing:
        print_commands(planned, options.slurm, options.retry_failed)
        return
    refuse_nodes(planned)
    screen = SweepScreen(len(planned), to_stderr=options.json)
    with own_folder(spec.folder, path.stem), hear_interrupts() as interrupts:
        run_all(path.stem, spec, planned, options.retry_failed, interrupts, screen)
    report = write_report(path.stem, spec, planned, {})
    if options.json:
        print(to_json(report_json(report)))
    sys.exit(_conclude(report, spec, interrupts, screen))


def make_parser() -> argparse.ArgumentParser:
    """The tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.sweep",
        description="Run a list or grid of overrides one after another on this machine, each in a folder of "
        "its own, and compare them in one HTML page. The same command goes on where it stopped: finished "
        "runs stay, a stopped or killed one goes on from its checkpoint, a failed one stays as it is unless "
        "--retry-failed. Ctrl-C: the run at hand saves and stops.",
        epilog="exit codes: 0 every run has finished or its plan is refused, 1 not so, 2 a mistake in the "
        "spec, 130 interrupted. "
        f"The spec's keys: docs/experiments.md. Studies that come with the project: {', '.join(_studies())}.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "spec", metavar="SPEC.yaml", help="the sweep: a path, or a name in configs/experiments/"
    )
    parser.add_argument(
        "--config", metavar="NAME_OR_PATH", help="instead of the spec's config, in a folder of its own"
    )
    parser.add_argument(
        "--processes", type=positive, metavar="N", help="of a node, for runs that do not say their own"
    )
    parser.add_argument(
        "--nodes", type=positive, metavar="N", help="of runs that do not say their own; for --slurm"
    )
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="of all runs; may be repeated"
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="where runs and report go (default: sweeps/ and the spec's name)"
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="start failed runs again, from their checkpoints"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--report", action="store_true", help="start nothing: make report.html and report.json anew"
    )
    what.add_argument("--dry-run", action="store_true", help="start nothing: print the commands")
    what.add_argument(
        "--slurm",
        action="store_true",
        help="start nothing: print a Slurm job for each run that is left to do",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the report as one JSON document; progress goes to stderr"
    )
    return parser


def find_spec(name: str) -> Path:
    """A path as it is, or the name of a study that comes with the project. Raises ConfigError."""
    for path in (Path(name), STUDIES / name, STUDIES / f"{name}.yaml"):
        if path.is_file():
            return path
    raise ConfigError(
        f"{name}: no such file, here or in configs/experiments, where there are {', '.join(_studies())}"
    )


def read_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Of --override, values as they were written: the config's parser knows their types. Raises
    ConfigError."""
    overrides = dict[str, str]()
    for text in texts:
        key, is_given, value = text.removeprefix("--").partition("=")
        if not is_given:
            raise ConfigError(
                f"--override {text} must be as train.steps=100: a key of a config and its value"
            )
        if key not in known_keys() and key not in RENAMED_KEYS:
            raise ConfigError(f"--override {text}: unknown key {one_line(key, 80)}. {near_key(key)}")
        overrides[key] = value
    return dict(rename_keys(overrides, "--override", warn_once))


def run_all(
    name: str,
    spec: Spec,
    planned: Sequence[PlannedRun],
    retry_failed: bool,
    interrupts: Sequence[int],
    screen: SweepScreen,
) -> None:
    """Every run that is left to do, with the report made anew after each."""
    for number, one in enumerate(planned):
        state, reason = state_of(one.folder)
        if one.refused:
            one.folder.mkdir(parents=True, exist_ok=True)
            write_attempt(one.folder, Attempt("refused", reason=one.refused))
            screen.ended(number, one, "refused", one.refused)
        elif state == "finished" or (state == "failed" and not retry_failed):
            again = " (--retry-failed starts it again)" if state == "failed" else ""
            screen.ended(number, one, state, f"before: {reason}{again}" if reason or again else "before")
        else:
            with screen.run(number, one) as watch:
                attempt = run_once(one, interrupts, watch)
            screen.ended(number, one, attempt.state, attempt.reason)
            write_report(name, spec, planned, {})
        if interrupts:
            return


def print_commands(planned: Sequence[PlannedRun], slurm: bool, retry_failed: bool) -> None:
    """What is left to do, as commands, and in comments why a run that has not finished is not among it."""
    left = []
    for one in planned:
        state, reason = state_of(one.folder)
        if one.refused:
            print(f"# {one.cell.name}: {one.refused.splitlines()[0]}")
        elif state == "failed" and not retry_failed:
            print(f"# {one.cell.name}: failed: {one_line(reason, 200)} (--retry-failed prints it)")
        elif state == "running" and slurm:
            job = shlex.join(slurm_command(one))
            print(f"# {one.cell.name}: running, by its status.json. If it was killed: {job}")
        elif state != "finished":
            left.append(slurm_command(one) if slurm else run_command(one))
    for command in left:
        print(shlex.join(command))


def write_report(
    name: str, spec: Spec, planned: Sequence[PlannedRun], changed: Mapping[str, Sequence[str]]
) -> SweepReport:
    """report.html and report.json, of the runs as they are now. Raises ConfigError where they cannot be
    written."""
    report = read_sweep(name, spec, planned, changed)
    make_folder(spec.folder)
    note_owner(spec.folder, name)
    write_whole(spec.folder / "report.json", (to_json(report_json(report)) + "\n").encode())
    write_whole(spec.folder / "report.html", make_page(report).encode())
    return report


def _conclude(report: SweepReport, spec: Spec, interrupts: Sequence[int], screen: SweepScreen) -> int:
    """Last words; the exit code."""
    states = Counter(row.state for row in report.rows)
    screen.line(f"{', '.join(f'{count} {state}' for state, count in states.items())}. {_where(spec)}")
    if interrupts:
        screen.line("interrupted: the same command goes on")
        return EXIT_INTERRUPTED
    if "stopped" in states:
        screen.line("a stopped run goes on with the same command")
    return 0 if all(state in ("finished", "refused") for state in states) else EXIT_NOT_ALL


def _where(spec: Spec) -> str:
    return f"report: {spec.folder / 'report.html'}"


def _studies() -> list[str]:
    return sorted(path.name for path in STUDIES.glob("*.yaml"))


if __name__ == "__main__":
    run_tool(main)
