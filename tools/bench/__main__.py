"""`python -m tools.bench SUBCOMMAND`: how fast, how big, how soon; and how well the planner knows."""

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tools.bench import calibrate, data, kills, memory, predictions, published, safety
from tools.bench.attention import DEFAULT_SHAPES, compare, parse_shape
from tools.bench.compile_depth import depth_setup, median_ratio, median_seconds, run_depths
from tools.bench.peers import OURS, best_peers, comparison_rows, contender_of, parse_peers, run_rounds, to_figures
from tools.bench.processes import CACHE_MODES, cache_environment
from tools.bench.record import make_document, write_record
from tools.bench.run import PROG, STANDARD_SHAPE, WARM_UP_STEPS, RunFigures, Setup, config_to_record, measure_run, resolve
from tools.bench.variants import parse_variants, variant_contenders, variant_figures, variant_rows
from tools.command import format_table, positive, run_tool

EXIT_TERMINATED = 128 + signal.SIGTERM  # what a shell reports
KEYS = "Config keys of train.main are accepted too, as --section.key=value, and win over the shape measured here."
SHAPE = ("dim 256, 6 layers, 16 heads and kv heads, ffn 768, vocabulary 2048, sequences of 512, 4 of them per process and "
         "step, data.source=stdlib, no evaluation, no checkpoint")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """What a subcommand found: figures as data and as text; `config` of the run where there is one."""

    config: dict[str, Any] | None
    figures: dict[str, Any]
    text: str


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then print and record. Raises what train.config.USER_ERRORS lists."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and options.subcommand in ("attention", "data"):
        parser.error(f"{options.subcommand} takes no config keys: {' '.join(overrides)}")
    result: Result = options.measure(options, overrides)
    document = make_document(options.subcommand, arguments, result.config, result.figures)
    print(json.dumps(document, indent=2) if options.json else result.text)
    if options.record is not None:
        path = write_record(document, options.record or options.subcommand)
        print(f"recorded: tools/bench/records/{path.name}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """One subparser per measurement."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROG}", description="Measure real runs, on whatever device they choose.",
                                     allow_abbrev=False)  # fmt: skip
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    _add_train(subparsers)
    _add_variants(subparsers)
    _add_peers(subparsers)
    _add_compile_depth(subparsers)
    _add_attention(subparsers)
    _add_data(subparsers)
    _add_planner(subparsers)
    _add_safety(subparsers)
    return parser


def _add_train(subparsers: Any) -> None:
    description = (f"Run train.main on the standard shape ({SHAPE}) and report tokens per second of a rank (median and best "
                   f"of the steps after the first {WARM_UP_STEPS}), seconds from the command to the end of the first step, peak "
                   "memory, recompiles, and the share of time spent waiting for data.")  # fmt: skip
    parser = _add(subparsers, "train", "one run: speed, memory, start-up", description, KEYS)
    _add_run_options(parser)
    parser.set_defaults(measure=measure_train)


def _add_variants(subparsers: Any) -> None:
    description = (f"Run ours on the standard shape ({SHAPE}) under several settings in turn, and print the figures of each and "
                   "their ratios to the first.")  # fmt: skip
    parser = _add(subparsers, "variants", "ours under several settings, interleaved", description, KEYS)
    parser.add_argument("--variant", action="append", required=True, metavar="NAME=KEYS",
                        help="config keys, as full='--parallel.activation_checkpoint=full'; may be none, as plain=''; given "
                             "several times, the first is what the others are compared with")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="runs of each (default 2)")
    _add_run_options(parser)
    parser.set_defaults(measure=measure_variants)


def _add_peers(subparsers: Any) -> None:
    description = (f"Run ours on the standard shape ({SHAPE}) and other trainers in turn, and print the ratios ours / peer. A "
                   "peer prints, from one rank or all, `BENCH startup_to_first_step_s=26.5` and "
                   "`BENCH tok/s/rank median=1399 peak_rss_GiB=0.92` (or another peak_..._GiB).")  # fmt: skip
    epilog = (f"{KEYS} They, --dtype, --compile and --processes are for ours: say the same to a peer in its command. "
              "OMP_NUM_THREADS and the cache are set for all alike; the rest of the environment passes through.")  # fmt: skip
    parser = _add(subparsers, "peers", "ours against other trainers, interleaved", description, epilog)
    parser.add_argument("--peer", action="append", required=True, metavar="NAME=COMMAND",
                        help="a shell command line, as titan='TT_COMPILE=1 bash run.sh'; may be given several times")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="runs of each (default 2)")
    _add_run_options(parser)
    parser.set_defaults(measure=measure_peers)


def _add_compile_depth(subparsers: Any) -> None:
    description = ("Compile models of several depths and a tiny width (dim 64, 4 heads, sequences of 64), one process, each with "
                   "an empty compile cache, in turn. Compile time is the first step's beyond a later one's.")  # fmt: skip
    parser = _add(subparsers, "compile-depth", "compile time against the number of layers", description, KEYS)
    parser.add_argument("--layers", type=positive, nargs="+", default=[4, 16], metavar="N", help="depths (default 4 16)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="runs of each (default 3)")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="CPU threads (default 1)")
    parser.set_defaults(measure=measure_compile_depth)


def _add_attention(subparsers: Any) -> None:
    description = ("Time forward and backward of the CPU attention kernel and of torch's scaled_dot_product_attention, one "
                   "thread, the best of several in turn, and compare their gradients with float64.")  # fmt: skip
    defaults = list(map(str, DEFAULT_SHAPES))
    parser = _add(subparsers, "attention", "our CPU attention kernel against torch's", description, "")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", default=defaults,
                        help=f"BATCHxHEADSxKV_HEADSxHEAD_DIMxSEQ (default {' '.join(defaults)})")  # fmt: skip
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=positive, default=10, metavar="N", help="timings of each (default 10)")
    parser.set_defaults(measure=measure_attention)


def _add_data(subparsers: Any) -> None:
    parser = _add(subparsers, "data", data.SUMMARY, data.DESCRIPTION, "")
    data.add_data_options(parser)
    parser.set_defaults(measure=lambda options, overrides: Result(None, *data.measure_data(options)))


def _add_planner(subparsers: Any) -> None:
    """What the planner predicts with, and how well."""
    parser = _add(subparsers, "calibrate", calibrate.SUMMARY, calibrate.DESCRIPTION, "")
    calibrate.add_calibrate_options(parser)
    parser.set_defaults(measure=lambda options, overrides: Result(None, *calibrate.calibrate(options, overrides)))
    parser = _add(subparsers, "predictions", predictions.SUMMARY, predictions.DESCRIPTION, predictions.EPILOG)
    predictions.add_predictions_options(parser)
    parser.set_defaults(measure=lambda options, overrides: Result(*predictions.compare_predictions(options, overrides)))
    parser = _add(subparsers, "memory", memory.SUMMARY, memory.DESCRIPTION, memory.EPILOG)
    memory.add_memory_options(parser)
    parser.set_defaults(measure=lambda options, overrides: Result(None, *memory.compare_memory(options, overrides)))
    parser = _add(subparsers, "published", published.SUMMARY, published.DESCRIPTION, "")
    parser.set_defaults(measure=lambda options, overrides: Result(None, *published.check_published(overrides)))


def _add_safety(subparsers: Any) -> None:
    """What faults do to a run, and what safety costs."""
    parser = _add(subparsers, "kills", kills.SUMMARY, kills.DESCRIPTION, kills.EPILOG)
    kills.add_kills_options(parser)
    parser.set_defaults(measure=lambda options, overrides: Result(*kills.measure_kills(options, overrides)))
    parser = _add(subparsers, "safety", safety.SUMMARY, safety.DESCRIPTION, safety.EPILOG)
    safety.add_safety_options(parser)
    parser.set_defaults(measure=lambda options, overrides: Result(*safety.measure_safety(options, overrides)))


def _add(subparsers: Any, name: str, summary: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=description, epilog=epilog,
                                                            allow_abbrev=False)  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document: what --record writes")
    parser.add_argument("--record", nargs="?", const="", metavar="NAME",
                        help=f"write tools/bench/records/DATE-NAME.json (NAME: {name} if not given)")  # fmt: skip
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=positive, default=2, metavar="N",
                        help="processes of the run (default 2); it takes GPUs where it has one for each")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=24, metavar="N", help="optimizer steps (default 24)")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="CPU threads per process (default 1)")
    parser.add_argument("--compile", choices=("true", "false"), default="true", help="default true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="of parameters and computation (default float32); gradients are reduced in float32")  # fmt: skip
    parser.add_argument("--cache", choices=CACHE_MODES, default="keep",
                        help="compile cache: as it is (keep, the default), empty for every run (cold), or filled by one more run "
                             "that does not count (warm)")  # fmt: skip


def measure_train(options: argparse.Namespace, overrides: Sequence[str]) -> Result:
    """One run on the standard shape."""
    setup = standard_setup(options, overrides)
    config = resolve(setup)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-cache-") as name:
        cache = cache_environment(options.cache, Path(name), "train", 0)
        if options.cache == "warm":
            measure_run(setup, cache)
        figures = measure_run(setup, cache)
    return Result(config_to_record(config), _with_setup(options, dataclasses.asdict(figures)), train_text(figures))


def measure_variants(options: argparse.Namespace, overrides: Sequence[str]) -> Result:
    """Ours under several settings, in turn."""
    variants = parse_variants(options.variant, standard_setup(options, overrides))
    configs = {name: config_to_record(resolve(setup)) for name, setup in variants.items()}
    rounds = run_rounds(variant_contenders(variants), options.rounds, options.cache)
    text = f"{format_table(*variant_rows(rounds))}\n\nmedian of {options.rounds} rounds"
    return Result(configs, _with_setup(options, variant_figures(rounds)), text)


def measure_peers(options: argparse.Namespace, overrides: Sequence[str]) -> Result:
    """Ours and the peers, in turn."""
    setup = standard_setup(options, overrides)
    peers = parse_peers(options.peer, options.threads)
    config = resolve(setup)
    figures = to_figures(run_rounds([contender_of(OURS, setup), *peers], options.rounds, options.cache))
    ratios = figures["ours_over_peer"]
    table = format_table(*comparison_rows(figures["median"], ratios, best_peers(ratios)))
    text = f"{table}\n\nours / peer: the median of {options.rounds} rounds; * the peer that we look worst against"
    return Result(config_to_record(config), _with_setup(options, figures), text)


def measure_compile_depth(options: argparse.Namespace, overrides: Sequence[str]) -> Result:
    """Compile time by depth."""
    setups = {layers: depth_setup(layers, options.threads, overrides) for layers in options.layers}
    configs = [resolve(setup) for setup in setups.values()]
    rounds = run_depths(setups, options.rounds)
    seconds, ratio = median_seconds(rounds), median_ratio(rounds)
    raw = [[dataclasses.asdict(compilation) for compilation in r.values()] for r in rounds]
    figures = {"median_compile_s": seconds, "deepest_over_shallowest": ratio, "rounds": raw}
    table = format_table(("layers", "compile s"), [(str(layers), f"{s:.2f}") for layers, s in seconds.items()])
    text = f"{table}\n\n{max(seconds)} layers / {min(seconds)} layers: {ratio:.2f} (median of {options.rounds} rounds)"
    return Result(config_to_record(configs[-1]), figures, text)


def measure_attention(options: argparse.Namespace, overrides: Sequence[str]) -> Result:
    """Both kernels on every shape and dtype."""
    shapes = [parse_shape(text) for text in options.shapes]
    rows = [compare(shape, getattr(torch, dtype), options.repeats) for shape in shapes for dtype in options.dtypes]
    head = ("shape", "dtype", "ours ms", "torch ms", "ours / torch", "ours error", "torch error")
    cells = [(r.shape, r.dtype, f"{1e3 * r.ours_s:.2f}", f"{1e3 * r.torch_s:.2f}", f"{r.ratio:.3f}", f"{r.ours_error:.2e}",
              f"{r.torch_error:.2e}") for r in rows]  # fmt: skip
    text = (f"{format_table(head, cells)}\n\nshape: batch x heads x kv heads x head dim x tokens; CPU time, best of "
            f"{options.repeats}; error: of the gradients, relative, against float64")  # fmt: skip
    return Result(None, {"rows": [dataclasses.asdict(row) for row in rows]}, text)


def standard_setup(options: argparse.Namespace, overrides: Sequence[str]) -> Setup:
    """The standard shape with the options, then the user's keys."""
    keys = [f"--train.steps={options.steps}", f"--parallel.compile.enabled={options.compile}",
            f"--parallel.param_dtype={options.dtype}"]  # fmt: skip
    return Setup(options.processes, options.threads, [*STANDARD_SHAPE, *keys, *overrides])


def train_text(figures: RunFigures) -> str:
    """A run's figures for people."""
    rows = [
        ("device", figures.device),
        ("tokens/s per rank, median", f"{figures.tokens_per_s_per_rank:,.0f}"),
        ("tokens/s per rank, best", f"{figures.tokens_per_s_per_rank_best:,.0f}"),
        ("start to end of first step, s", f"{figures.startup_s:.2f}"),
        ("peak memory per rank, GiB", f"{figures.peak_memory_gib:.2f}"),
        ("recompiles", str(figures.recompiles)),
        ("waiting for data", f"{figures.data_wait_share:.2%}"),
    ]
    return format_table(("figure", "value"), rows)


def _with_setup(options: argparse.Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    return {"processes": options.processes, "threads": options.threads, "cache": options.cache, **figures}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_TERMINATED))  # an exception: what runs is ended first
    run_tool(main)
