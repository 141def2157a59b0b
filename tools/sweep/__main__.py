"""`python -m tools.sweep SPEC.yaml`: run a training with several variants of its config, one after
another, and compare them in one HTML page."""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.parallel.errors import one_line
from meshwright.tools.cli import EXIT_INTERRUPTED, positive, run_tool, to_json
from meshwright.tools.plan.export import write_atomically
from meshwright.tools.sweep.html_report import make_page
from meshwright.tools.sweep.preflight import PlannedRun, changed_runs, check_sweep, refuse_changed
from meshwright.tools.sweep.progress import SweepScreen
from meshwright.tools.sweep.results import SweepReport, read_sweep, report_json
from meshwright.tools.sweep.runner import (
    Attempt,
    catch_interrupts,
    launched_with,
    locked_folder,
    make_folder,
    record_owner,
    refuse_nodes,
    refuse_other_owner,
    run_command,
    run_once,
    slurm_command,
    state_of,
    write_attempt,
)
from meshwright.tools.sweep.spec import Spec, read_spec
from meshwright.train.config_parser import has_value, key_hint
from meshwright.train.errors import ConfigError

EXIT_NOT_ALL = 1  # a run is neither finished nor refused
STUDIES = Path(__file__).resolve().parents[2] / "configs" / "experiments"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sweep, print its commands, or make its report, as the options request. Raises ConfigError,
    PlanError, DataError and LockError."""
    options = make_parser().parse_args(arguments)
    path = find_spec(options.spec)
    given = {key: getattr(options, key) for key in ("config", "processes", "nodes", "folder")}
    spec = read_spec(
        path,
        {key: value for key, value in given.items() if value is not None},
        read_overrides(options.override),
    )
    refuse_other_owner(spec.folder, path.stem)
    prints_commands = options.slurm or options.dry_run
    planned = check_sweep(spec, local=not (prints_commands or options.report))
    changed = changed_runs(planned, launched_with)
    if options.report:
        report = write_report(path.stem, spec, planned, changed)
        print(to_json(report_json(report)) if options.json else _where(spec))
        return
    refuse_changed(changed, spec.folder)
    if prints_commands:
        print_commands(planned, options.slurm, options.retry_failed)
        return
    refuse_nodes(planned)
    screen = SweepScreen(len(planned), to_stderr=options.json)
    with locked_folder(spec.folder, path.stem), catch_interrupts() as interrupts:
        run_all(path.stem, spec, planned, options.retry_failed, interrupts, screen)
    report = write_report(path.stem, spec, planned, {})
    if options.json:
        print(to_json(report_json(report)))
    sys.exit(_conclude(report, spec, interrupts, screen))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.sweep",
        description="Run a list or grid of config overrides one after another on this machine, each run in "
        "its own folder, and compare them in one HTML page. The same command resumes a sweep: finished runs "
        "are kept, a stopped or killed run resumes from its checkpoint, a failed run is started again only "
        "with --retry-failed. Ctrl-C: the current run saves and stops.",
        epilog="exit codes: 0 every run finished or its plan was refused, 1 otherwise, 2 an error in the "
        "spec or the options, 130 interrupted. "
        f"Keys of the spec: docs/experiments.md. Included studies: {', '.join(_studies())}.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "spec", metavar="SPEC.yaml", help="the sweep: a path, or the name of a study in configs/experiments/"
    )
    parser.add_argument(
        "--config",
        metavar="NAME_OR_PATH",
        help="config to use instead of the spec's; changes the default folder",
    )
    parser.add_argument(
        "--processes", type=positive, metavar="N", help="processes per node, for runs that do not set it"
    )
    parser.add_argument(
        "--nodes",
        type=positive,
        metavar="N",
        help="nodes, for runs that do not set it; more than 1 requires --slurm",
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="config override for all runs; may be repeated",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="folder of the runs and the report (default: sweeps/ and the spec's name)",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="restart failed runs from their checkpoints"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--report", action="store_true", help="start nothing: only rewrite report.html and report.json"
    )
    action.add_argument("--dry-run", action="store_true", help="start nothing: print the commands")
    action.add_argument(
        "--slurm",
        action="store_true",
        help="start nothing: print an sbatch command for each run left to do",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the report as one JSON document; progress goes to stderr"
    )
    return parser


def find_spec(name: str) -> Path:
    """Return a spec's path: a file, or a study in configs/experiments by its name. Raises ConfigError."""
    for path in (Path(name), STUDIES / name, STUDIES / f"{name}.yaml"):
        if path.is_file():
            return path
    raise ConfigError(
        f"{name}: no such file, nor a study in configs/experiments: use a path or one of "
        f"{', '.join(_studies())}"
    )


def read_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Parse --override KEY=VALUE. Values stay text, for the config parser. Raises ConfigError."""
    overrides = dict[str, str]()
    for text in texts:
        key, is_given, value = text.removeprefix("--").partition("=")
        if not is_given:
            raise ConfigError(f"--override {text}: must be a config key and a value, such as train.steps=100")
        if not has_value(key):
            raise ConfigError(f"--override {text}: unknown key {one_line(key, 80)}. {key_hint(key)}")
        overrides[key] = value
    return overrides


def run_all(
    name: str,
    spec: Spec,
    planned: Sequence[PlannedRun],
    retry_failed: bool,
    interrupts: Sequence[int],
    screen: SweepScreen,
) -> None:
    """Start or resume every run that is left to do, and write the report after each. A failed run is left to
    do only with `retry_failed`; one whose plan is refused is only recorded."""
    for number, run in enumerate(planned):
        state, reason = state_of(run.folder)
        if run.refused:
            run.folder.mkdir(parents=True, exist_ok=True)
            write_attempt(run.folder, Attempt("refused", reason=run.refused))
            screen.ended(number, run, "refused", run.refused)
        elif state == "finished" or (state == "failed" and not retry_failed):
            retry = " (--retry-failed restarts it)" if state == "failed" else ""
            screen.ended(number, run, state, f"earlier: {reason}{retry}" if reason or retry else "earlier")
        else:
            with screen.run(number, run) as watch:
                attempt = run_once(run, interrupts, watch)
            screen.ended(number, run, attempt.state, attempt.reason)
            write_report(name, spec, planned, {})
        if interrupts:
            return


def print_commands(planned: Sequence[PlannedRun], slurm: bool, retry_failed: bool) -> None:
    """Print the commands of all runs left to do; comments give the reason for each unfinished run that is
    not among them."""
    commands = []
    for run in planned:
        state, reason = state_of(run.folder)
        if run.refused:
            print(f"# {run.cell.name}: {run.refused.splitlines()[0]}")
        elif state == "failed" and not retry_failed:
            print(f"# {run.cell.name}: failed: {one_line(reason, 200)} (--retry-failed includes it)")
        elif state == "running" and slurm:
            job = shlex.join(slurm_command(run))
            print(f"# {run.cell.name}: running according to its status.json. If it was killed: {job}")
        elif state != "finished":
            commands.append(slurm_command(run) if slurm else run_command(run))
    for command in commands:
        print(shlex.join(command))


def write_report(
    name: str, spec: Spec, planned: Sequence[PlannedRun], changed: Mapping[str, Sequence[str]]
) -> SweepReport:
    """Write report.html and report.json from the runs' folders. Raises ConfigError if that fails."""
    report = read_sweep(name, spec, planned, changed)
    make_folder(spec.folder)
    record_owner(spec.folder, name)
    write_atomically(spec.folder / "report.json", (to_json(report_json(report)) + "\n").encode())
    write_atomically(spec.folder / "report.html", make_page(report).encode())
    return report


def _conclude(report: SweepReport, spec: Spec, interrupts: Sequence[int], screen: SweepScreen) -> int:
    """Print the closing summary; return the exit code."""
    states = Counter(row.state for row in report.rows)
    screen.line(f"{', '.join(f'{count} {state}' for state, count in states.items())}. {_where(spec)}")
    if interrupts:
        screen.line("interrupted: the same command resumes the sweep")
        return EXIT_INTERRUPTED
    if "stopped" in states:
        screen.line("a stopped run resumes with the same command")
    return 0 if all(state in ("finished", "refused") for state in states) else EXIT_NOT_ALL


def _where(spec: Spec) -> str:
    return f"report: {spec.folder / 'report.html'}"


def _studies() -> list[str]:
    return sorted(path.name for path in STUDIES.glob("*.yaml"))


if __name__ == "__main__":
    run_tool(main)
