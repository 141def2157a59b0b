"""Our own run under several settings, interleaved: what a mesh, a checkpointing mode or a dtype costs and saves."""

import re
import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench.peers import FIGURES, Contender, Figures, contender_of, make_medians
from tools.bench.processes import BenchError
from tools.bench.run import Setup


def parse_variants(texts: Sequence[str], setup: Setup) -> dict[str, Setup]:
    """Setups by name from NAME='--section.key=value ...' texts; the keys may be none. Raises BenchError."""
    variants: dict[str, Setup] = {}
    for text in texts:
        name, equals, keys = (part.strip() for part in text.partition("="))
        if not re.fullmatch(r"\w[\w.-]*", name) or not equals or any(not key.startswith("--") for key in keys.split()):
            raise BenchError(f"--variant {text!r} must read NAME='--section.key=value ...', as --variant "
                             "full='--parallel.activation_checkpoint=full'")  # fmt: skip
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
    against = {name: {figure: statistics.median(r[name][figure] / r[first][figure] for r in rounds) for figure in FIGURES}
               for name in rounds[0]}  # fmt: skip
    return {"median": make_medians(rounds), f"over_{first}": against, "rounds": list(rounds)}


def variant_rows(rounds: Sequence[dict[str, Figures]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table, one row a variant."""
    first = next(iter(rounds[0]))
    figures = variant_figures(rounds)
    head = ["variant", *FIGURES, *(f"{figure} / {first}" for figure in FIGURES)]
    rows = []
    for name in rounds[0]:
        medians, ratios = figures["median"][name], figures[f"over_{first}"][name]
        rows.append([name, *(f"{medians[figure]:,.2f}" for figure in FIGURES), *(f"{ratios[figure]:.3f}" for figure in FIGURES)])
    return head, rows
