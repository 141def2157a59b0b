"""`python -m tools.bench SUBCOMMAND`: how fast, how big, how soon; and how well the planner knows."""

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
    no_options,
    with_config,
    without_config,
    write_record,
)
from meshwright.tools.bench.planner import memory, predictions, published, scaling
from meshwright.tools.bench.speed import attention, cpu, data, peers
from meshwright.tools.bench.speed import compile as compile_time
from meshwright.tools.bench.train_run import PROG
from meshwright.tools.cli import run_tool

EXIT_TERMINATED = 128 + signal.SIGTERM  # what a shell reports
MEASUREMENTS = (
    Measurement(
        "gpu",
        gpu.SUMMARY,
        gpu.DESCRIPTION,
        gpu.EPILOG,
        gpu.add_gpu_options,
        gpu.measure_gpu,
        keeps_record=True,
    ),
    Measurement("cpu", cpu.SUMMARY, cpu.DESCRIPTION, cpu.EPILOG, cpu.add_cpu_options, cpu.measure_cpu),
    Measurement(
        "compile",
        compile_time.SUMMARY,
        compile_time.DESCRIPTION,
        compile_time.EPILOG,
        compile_time.add_compile_options,
        compile_time.measure_compile,
    ),
    Measurement(
        "scale",
        scaling.SUMMARY,
        scaling.DESCRIPTION,
        scaling.EPILOG,
        scaling.add_scale_options,
        scaling.measure_scale,
    ),
    Measurement(
        "train",
        train_run.SUMMARY,
        train_run.DESCRIPTION,
        train_run.EPILOG,
        train_run.add_run_options,
        train_run.measure_train,
    ),
    Measurement(
        "peers", peers.SUMMARY, peers.DESCRIPTION, peers.EPILOG, peers.add_peers_options, peers.measure_peers
    ),
    Measurement(
        "attention",
        attention.SUMMARY,
        attention.DESCRIPTION,
        "",
        attention.add_attention_options,
        attention.measure_attention,
        takes_keys=False,
    ),
    Measurement(
        "data",
        data.SUMMARY,
        data.DESCRIPTION,
        "",
        data.add_data_options,
        without_config(lambda options, overrides: data.measure_data(options)),
        takes_keys=False,
    ),
    Measurement(
        "calibrate",
        calibrate.SUMMARY,
        calibrate.DESCRIPTION,
        "",
        calibrate.add_calibrate_options,
        without_config(calibrate.calibrate),
    ),
    Measurement(
        "predictions",
        predictions.SUMMARY,
        predictions.DESCRIPTION,
        predictions.EPILOG,
        predictions.add_predictions_options,
        with_config(predictions.compare_predictions),
    ),
    Measurement(
        "memory",
        memory.SUMMARY,
        memory.DESCRIPTION,
        memory.EPILOG,
        memory.add_memory_options,
        without_config(memory.compare_memory),
    ),
    Measurement(
        "published",
        published.SUMMARY,
        published.DESCRIPTION,
        "",
        no_options,
        without_config(lambda options, overrides: published.check_published(overrides)),
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then print and record. Raises what train.config.USER_ERRORS lists."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)
    measurement: Measurement = options.measurement
    if overrides and not measurement.takes_keys:
        parser.error(f"{measurement.name} takes no config keys: {' '.join(overrides)}")
    options.command = arguments
    result: BenchResult = measurement.measure(options, overrides)
    document = make_document(measurement.name, arguments, result.config, result.figures)
    print(json.dumps(document, indent=2) if options.json else result.text)
    if options.record is not None and not measurement.keeps_record:
        path = write_record(document, options.record or measurement.name)
        print(f"recorded: tools/bench/records/{path.name}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """One subparser per measurement."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROG}",
        description="Measure real runs, on whatever device they choose.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for measurement in MEASUREMENTS:
        add_measurement(subparsers, measurement)
    return parser


if __name__ == "__main__":
    # an exception: what runs is ended first
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_TERMINATED))
    run_tool(main)
