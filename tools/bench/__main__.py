"""`python -m tools.bench SUBCOMMAND`: measure speed, memory and start-up, and the planner's accuracy."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from meshwright.tools.bench import gpu, train_run
from meshwright.tools.bench.calibrate import command as calibrate
from meshwright.tools.bench.harness import (
    BenchResult,
    Measurement,
    add_measurement,
    make_document,
    write_record,
)
from meshwright.tools.bench.own_model import command as own_model
from meshwright.tools.bench.planner import accumulation, dryrun, fit, memory, predictions, published, scaling
from meshwright.tools.bench.ranks import command as ranks
from meshwright.tools.bench.speed import attention, cpu, data
from meshwright.tools.bench.train_run import PROG
from meshwright.tools.cli import run_tool

EXIT_TERMINATED = 128 + signal.SIGTERM  # what a shell reports
MODULES = (
    gpu,
    cpu,
    train_run,
    attention,
    data,
    calibrate,
    predictions,
    memory,
    dryrun,
    published,
    fit,
    scaling,
    accumulation,
    ranks,
    own_model,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then print and record. Raises the classes in train.errors.USER_ERRORS."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)
    measurement: Measurement = options.measurement
    if overrides and not measurement.takes_keys:
        parser.error(f"{measurement.name} accepts no config keys: {' '.join(overrides)}")
    options.command = arguments
    result: BenchResult = measurement.measure(options, overrides)
    document = make_document(measurement.name, arguments, result.config, result.figures)
    print(json.dumps(document, indent=2) if options.json else result.text)
    if options.record is not None and not measurement.keeps_record:
        path = write_record(document, options.record or measurement.name)
        print(f"recorded: tools/bench/records/{path.name}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser, with one subparser per measurement."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROG}",
        description="Measure real runs and parts of them on this machine, and the accuracy of the planner.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for module in MODULES:
        add_measurement(subparsers, module.MEASUREMENT)
    return parser


if __name__ == "__main__":
    # SIGTERM raises SystemExit, so that running commands are terminated first
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_TERMINATED))
    run_tool(main)
