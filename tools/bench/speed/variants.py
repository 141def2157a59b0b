"""Our own run under several settings, interleaved: what a mesh, a checkpointing mode or a dtype costs and
saves."""

import argparse
import re
import statistics
from collections.abc import Sequence
from typing import Any

from meshwright.tools.bench.harness import KEYS, BenchResult
from meshwright.tools.bench.speed.peers import (
    FIGURES,
    Contender,
    Figures,
    contender_of,
    make_medians,
    make_spreads,
    run_rounds,
    spread_text,
)
from meshwright.tools.bench.train_run import (
    SHAPE,
    Setup,
    add_run_options,
    config_to_record,
    resolve,
    standard_setup,
    with_setup,
)
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError

SUMMARY = "ours under several settings, interleaved"
DESCRIPTION = (
    f"Run ours on the standard shape ({SHAPE}) under several settings in turn, and print the figures of each "
    "and their ratios to the first."
)
EPILOG = KEYS


def add_variants_options(parser: argparse.ArgumentParser) -> None:
    """Options of `variants`."""
    parser.add_argument(
        "--variant",
        action="append",
        required=True,
        metavar="NAME=KEYS",
        help="config keys, as full='--parallel.activation_checkpoint=full'; may be none, as plain=''; given "
        "several times, the first is what the others are compared with",
    )
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="runs of each (default 2)")
    add_run_options(parser)


def measure_variants(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Ours under several settings, in turn."""
    variants = parse_variants(options.variant, standard_setup(options, overrides))
    configs = {name: config_to_record(resolve(setup)) for name, setup in variants.items()}
    rounds = run_rounds(variant_contenders(variants), options.rounds, options.cache)
    figures = variant_figures(rounds)
    apart = spread_text(figures["spread"], options.rounds)
    text = f"{format_table(*variant_rows(rounds))}\n\nmedian of {options.rounds} rounds; {apart}"
    return BenchResult(configs, with_setup(options, figures), text)


def parse_variants(texts: Sequence[str], setup: Setup) -> dict[str, Setup]:
    """Setups by name from NAME='--section.key=value ...' texts; the keys may be none. Raises BenchError."""
    variants: dict[str, Setup] = {}
    for text in texts:
        name, equals, keys = (part.strip() for part in text.partition("="))
        if (
            not re.fullmatch(r"\w[\w.-]*", name)
            or not equals
            or any(not key.startswith("--") for key in keys.split())
        ):
            raise BenchError(
                f"--variant {text!r} must read NAME='--section.key=value ...', as --variant "
                "full='--parallel.activation_checkpoint=full'"
            )
        if name in variants:
            raise BenchError(f"--variant {name}: this name is taken. Give every variant a name of its own")
        variants[name] = Setup(setup.processes, setup.threads, [*setup.arguments, *keys.split()])
    if len(variants) < 2:
        raise BenchError("--variant: give at least two, to compare them with the first")
    return variants


def variant_contenders(variants: dict[str, Setup]) -> list[Contender]:
    """What `run_rounds` runs in turn."""
    return [contender_of(name, setup) for name, setup in variants.items()]


def variant_figures(rounds: Sequence[dict[str, Figures]]) -> dict[str, Any]:
    """Medians, and every variant against the first: the median of the ratios within each round."""
    first = next(iter(rounds[0]))
    against = {
        name: {
            figure: statistics.median(r[name][figure] / r[first][figure] for r in rounds)
            for figure in FIGURES
        }
        for name in rounds[0]
    }
    return {
        "median": make_medians(rounds),
        "spread": make_spreads(rounds),
        f"over_{first}": against,
        "rounds": list(rounds),
    }


def variant_rows(rounds: Sequence[dict[str, Figures]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table, one row a variant."""
    first = next(iter(rounds[0]))
    figures = variant_figures(rounds)
    head = ["variant", *FIGURES, *(f"{figure} / {first}" for figure in FIGURES)]
    rows = []
    for name in rounds[0]:
        medians, ratios = figures["median"][name], figures[f"over_{first}"][name]
        rows.append(
            [
                name,
                *(f"{medians[figure]:,.2f}" for figure in FIGURES),
                *(f"{ratios[figure]:.3f}" for figure in FIGURES),
            ]
        )
    return head, rows
