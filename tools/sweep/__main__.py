"""`python -m tools.sweep SPEC.yaml`: run a training with several variants of its config, one after
another, and compare them in one HTML page."""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from meshwright.parallel.errors import one_line
from meshwright.tools.cli import EXIT_INTERRUPTED, new_parser, positive, run_tool, to_json
from meshwright.tools.plan.export import write_atomically
from meshwright.tools.sweep.html_report import make_page
from meshwright.tools.sweep.results import SweepResults, read_result, read_sweep, to_document
from meshwright.tools.sweep.runner import OUTPUT, interruptible, make_folder, run_command, run_once
from meshwright.tools.sweep.spec import STUDIES, Spec, SweepRun, find_spec, make_runs, read_spec
from meshwright.train.errors import ConfigError
from meshwright.train.fault_tolerance.run_folder import lock_folder, read_status

REASON_LETTERS = 240  # of a reason, on the terminal
EXIT_NOT_ALL = 1  # a run is neither finished nor refused
EXAMPLES = """examples:
    python -m tools.sweep prefetch                       # an included study, on this machine
    python -m tools.sweep mine.yaml --repeat 3           # your own; repeats show the spread
    python -m tools.sweep mine.yaml --override train.steps=100 --dry-run

The same command continues a sweep: finished runs are kept, all others start again, from their checkpoints if
they have some. Ctrl-C: the current run saves and stops. Keys of the spec: docs/experiments.md."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sweep, print its commands, or make its report, as the options request. Raises ConfigError and
    LockError."""
    options = make_parser().parse_args(arguments)
    path = find_spec(options.spec)
    given = {key: getattr(options, key) for key in ("config", "processes", "repeat", "folder")}
    changes = {key: value for key, value in given.items() if value is not None}
    spec = read_spec(path, changes, read_overrides(options.override))
    runs = make_runs(path, spec)
    if options.dry_run:
        for run in runs:
            if not is_finished(run):
                print(shlex.join(run_command(run)))
        return
    if options.report and not spec.folder.is_dir():
        raise ConfigError(
            f"--report: there is no folder {spec.folder}: name one in which this sweep was started"
        )
    show = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    interrupted = not options.report and run_all(path.stem, spec, runs, show)
    results = write_report(path.stem, spec, runs)
    states = Counter(run.state for run in results.runs)
    show(f"{', '.join(f'{count} {state}' for state, count in states.items())}. {results.verdict}")
    show(f"report: {spec.folder / 'report.html'}")
    if options.json:
        print(to_json(to_document(results)))
    if interrupted:
        show("interrupted: the same command continues the sweep")
        sys.exit(EXIT_INTERRUPTED)
    if not options.report and states.keys() - {"finished", "refused"}:
        sys.exit(EXIT_NOT_ALL)


def make_parser() -> argparse.ArgumentParser:
    studies = ", ".join(sorted(path.stem for path in STUDIES.glob("*.yaml")))
    codes = (
        "exit codes: 0 every run finished or its plan was refused, 1 otherwise, 2 a wrong spec or option, 130"
    )
    parser = new_parser("sweep", "SPEC.yaml", EXAMPLES, f"{codes} interrupted.\nincluded studies: {studies}")
    add = parser.add_argument
    add("spec", metavar="SPEC.yaml", help="the sweep: a file, or the name of a study in configs/experiments/")
    add("--config", metavar="X", help="replaces the spec's; the default folder then has its name too")
    add("--processes", type=positive, metavar="N", help="processes of each run that does not set its own")
    add("--repeat", type=positive, metavar="N", help="how often each run is repeated")
    add("--folder", metavar="DIR", help="folder of runs and report (default: sweeps/ and the spec's name)")
    override = "a config key of all runs; may be given several times"
    add("--override", action="append", default=[], metavar="KEY=VALUE", help=override)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--dry-run", action="store_true", help="only print the commands of unfinished runs")
    report = "start nothing: make the page of the runs as they are, also of those started elsewhere"
    action.add_argument("--report", action="store_true", help=report)
    add("--json", action="store_true", help="print the results as JSON; progress goes to stderr")
    return parser


def read_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Parse --override KEY=VALUE. Values stay text, for the config parser. Raises ConfigError."""
    pairs = [text.removeprefix("--").partition("=") for text in texts]
    if without := next((text for text, (_, equals, _) in zip(texts, pairs, strict=True) if not equals), None):
        raise ConfigError(f"--override {without}: must be a config key and a value, such as train.steps=100")
    return {key: value for key, _, value in pairs}


def run_all(name: str, spec: Spec, runs: Sequence[SweepRun], show: Callable[[str], None]) -> bool:
    """Start every run that has not finished, and write the report after each. Returns whether it was
    interrupted."""
    make_folder(spec.folder)
    lock = lock_folder(spec.folder)
    try:
        with interruptible():
            for number, run in enumerate(runs, 1):
                title = f"[{number}/{len(runs)}] {run.name}:"
                if not is_finished(run):
                    show(f"{title} started, output: {run.folder / OUTPUT}")
                    run_once(run)
                    write_report(name, spec, runs)
                show(f"{title} {describe_run(run)}")
    except KeyboardInterrupt:
        return True
    finally:
        lock.release()
    return False


def describe_run(run: SweepRun) -> str:
    """Describe a run's state on one line: figures, and the reason if there is one."""
    result = read_result(run, {})
    figures = [f"{title} {text}" for title, text in result.texts().items() if text]
    reason = f": {one_line(result.reason, REASON_LETTERS)}" if result.reason else ""
    return f"{', '.join([result.state, *figures])}{reason}"


def is_finished(run: SweepRun) -> bool:
    """Whether the run has finished; all others are left to do."""
    status = read_status(run.folder)
    return status is not None and status.state == "finished"


def write_report(name: str, spec: Spec, runs: Sequence[SweepRun]) -> SweepResults:
    """Write report.html and report.json from the runs' folders. Raises ConfigError if that fails."""
    results = read_sweep(name, spec, runs)
    make_folder(spec.folder)
    write_atomically(spec.folder / "report.json", (to_json(to_document(results)) + "\n").encode())
    write_atomically(spec.folder / "report.html", make_page(results).encode())
    return results


if __name__ == "__main__":
    run_tool(main)
