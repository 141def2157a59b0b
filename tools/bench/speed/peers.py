"""A run of ours against other trainers, interleaved: A B C A B C ..."""

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.tools.bench.harness import KEYS, BenchResult
from meshwright.tools.bench.train_run import (
    SHAPE,
    Setup,
    add_run_options,
    config_to_record,
    measure_run,
    resolve,
    spread,
    standard_setup,
    with_setup,
)
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError, cache_environment, make_environment, run_to_end

OURS = "meshwright"
SUMMARY = "ours against other trainers, interleaved"
DESCRIPTION = (
    f"Run ours on the standard shape ({SHAPE}) and other trainers in turn, and print the ratios ours / peer. "
    "A peer prints, from one rank or all, `BENCH startup_to_first_step_s=26.5` and `BENCH tok/s/rank "
    "median=1399 peak_rss_GiB=0.92` (or another peak_..._GiB)."
)
EPILOG = (
    f"{KEYS} They, --dtype, --compile and --processes are for ours: say the same to a peer in its command. "
    "OMP_NUM_THREADS and the cache are set for all alike; the rest of the environment passes through."
)
PEER_HELP = "a shell command line, as titan='TT_COMPILE=1 bash run.sh'; may be given several times"
# which of them is better
FIGURES = {"tokens_per_s_per_rank": "more", "peak_memory_gib": "less", "startup_s": "less"}
PATTERNS = {
    "tokens_per_s_per_rank": r"tok/s/rank median=(\S+)",
    "peak_memory_gib": r"peak_\w+_GiB=(\S+)",
    "startup_s": r"startup_to_first_step_s=(\S+)",
}

Figures = dict[str, float]
Ratios = dict[str, dict[str, float]]  # of a figure, by peer


@dataclass(frozen=True)
class Contender:
    """A trainer under its name; `run` takes the environment variables of its compile cache."""

    name: str
    run: Callable[[dict[str, str]], Figures]


def add_peers_options(parser: argparse.ArgumentParser) -> None:
    """Options of `peers`."""
    parser.add_argument("--peer", action="append", required=True, metavar="NAME=COMMAND", help=PEER_HELP)
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="runs of each (default 2)")
    add_run_options(parser)


def measure_peers(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Ours and the peers, in turn."""
    setup = standard_setup(options, overrides)
    peers = parse_peers(options.peer, options.threads)
    config = resolve(setup)
    figures = to_figures(run_rounds([contender_of(OURS, setup), *peers], options.rounds, options.cache))
    ratios = figures["ours_over_peer"]
    table = format_table(*comparison_rows(figures["median"], ratios, best_peers(ratios)))
    last = f"ours / peer: the median of {options.rounds} rounds; * the peer that we look worst against"
    text = f"{table}\n\n{spread_text(figures['spread'], options.rounds)}\n{last}"
    return BenchResult(config_to_record(config), with_setup(options, figures), text)


def contender_of(name: str, setup: Setup) -> Contender:
    """A run of train.main."""

    def run(cache: dict[str, str]) -> Figures:
        figures = measure_run(setup, cache)
        return {name: getattr(figures, name) for name in FIGURES}

    return Contender(name, run)


def parse_peers(texts: Sequence[str], threads: int) -> list[Contender]:
    """Contenders from NAME=COMMAND texts. Raises BenchError."""
    peers: list[Contender] = []
    for text in texts:
        name, _, command = (part.strip() for part in text.partition("="))
        if not re.fullmatch(r"\w[\w.-]*", name) or not command:
            raise BenchError(f"--peer {text!r} must read NAME='COMMAND', as --peer titan='bash run.sh'")
        if name == OURS or name in (peer.name for peer in peers):
            raise BenchError(f"--peer {name}: this name is taken. Give every peer a name of its own")
        peers.append(_peer(name, command, threads))
    return peers


def parse_bench_lines(text: str) -> Figures:
    """Figures of the `BENCH key=value ...` lines of all ranks: the median speed, the most memory, the latest
    start.

    A line may carry torchrun's prefix, such as `[rank0]:`. Raises BenchError naming what is missing.
    """
    lines = "\n".join(re.findall(r"^(?:\[\S+\]:\s*)?BENCH\b(.*)$", text, re.MULTILINE))
    found = {
        figure: [_number(value) for value in re.findall(pattern, lines)]
        for figure, pattern in PATTERNS.items()
    }
    missing = [PATTERNS[figure].replace(r"(\S+)", "...") for figure, values in found.items() if not values]
    if missing:
        raise BenchError(f"its output has no BENCH line with {' nor '.join(missing)}")
    return {
        figure: statistics.median(values) if FIGURES[figure] == "more" else max(values)
        for figure, values in found.items()
    }


def run_rounds(contenders: Sequence[Contender], rounds: int, cache: str) -> list[dict[str, Figures]]:
    """Figures of every round by contender; each gets one run that does not count where the cache is to be
    warm."""
    return run_what_runs(contenders, rounds, cache, frozenset(contender.name for contender in contenders))[0]


def run_what_runs(
    contenders: Sequence[Contender], rounds: int, cache: str, needed: frozenset[str] = frozenset({OURS})
) -> tuple[list[dict[str, Figures]], dict[str, str]]:
    """Figures of every round by contender, and the contenders that failed with what they said: they are left
    out of all rounds. Raises BenchError where one that is `needed` fails."""
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-cache-") as name:
        folder, results = Path(name), []
        for turn in range(0 if cache == "warm" else 1, rounds + 1):
            result = {}
            for contender in contenders:
                if contender.name in left_out:
                    continue
                try:
                    result[contender.name] = contender.run(
                        cache_environment(cache, folder, contender.name, turn)
                    )
                    _say(turn, contender.name, result[contender.name])
                except BenchError as error:
                    if contender.name in needed:
                        raise
                    left_out[contender.name] = str(error)
            if turn:
                results.append(result)
    return [{name: figures for name, figures in r.items() if name not in left_out} for r in results], left_out


def make_medians(rounds: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """Median over the rounds, by contender."""
    return {
        name: {figure: statistics.median(r[name][figure] for r in rounds) for figure in FIGURES}
        for name in rounds[0]
    }


def make_spreads(rounds: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """(Largest - smallest) / median over the rounds, by contender."""
    medians = make_medians(rounds)
    return {
        name: {figure: spread([r[name][figure] for r in rounds], medians[name][figure]) for figure in FIGURES}
        for name in rounds[0]
    }


def spread_text(spreads: dict[str, Figures], rounds: int) -> str:
    """How far the rounds were apart in speed, a line."""
    words = (f"{name} {figures['tokens_per_s_per_rank']:.1%}" for name, figures in spreads.items())
    return f"spread of the speed over the rounds: {', '.join(words) if rounds > 1 else 'one round has none'}"


def make_ratios(rounds: Sequence[dict[str, Figures]]) -> Ratios:
    """Ours / peer's: the median of the ratios within each round, so that a machine that drifts hurts
    neither."""
    peers = [name for name in rounds[0] if name != OURS]
    return {
        figure: {peer: statistics.median(r[OURS][figure] / r[peer][figure] for r in rounds) for peer in peers}
        for figure in FIGURES
    }


def best_peers(ratios: Ratios) -> dict[str, str]:
    """By figure, the peer that we look worst against; nothing where there is no peer."""
    return {
        figure: (min if FIGURES[figure] == "more" else max)(by_peer, key=lambda peer: by_peer[peer])
        for figure, by_peer in ratios.items()
        if by_peer
    }


def comparison_rows(
    medians: dict[str, Figures], ratios: Ratios, best: dict[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: figures of each, then ours / each; a star marks the best peer."""
    peers = [name for name in medians if name != OURS]
    head = ["median", "better", *medians, *(f"ours / {peer}" for peer in peers)]
    rows = []
    for figure, better in FIGURES.items():
        figures = [f"{medians[name][figure]:,.2f}" for name in medians]
        against = [f"{ratios[figure][peer]:.3f}{' *' if best[figure] == peer else ''}" for peer in peers]
        rows.append([figure, better, *figures, *against])
    return head, rows


def _peer(name: str, command: str, threads: int) -> Contender:
    def run(cache: dict[str, str]) -> Figures:
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
            log = Path(folder) / "log"
            try:
                run_to_end(command, make_environment(threads, cache), log, lambda: None)
                return parse_bench_lines(log.read_text(encoding="utf-8", errors="replace"))
            except BenchError as error:
                raise BenchError(f"--peer {name}: {error}") from None

    return Contender(name, run)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise BenchError(f"its BENCH lines say {text!r} where a positive number must be")
    return value


def _say(turn: int, name: str, figures: Figures) -> None:
    """Progress, on stderr."""
    what = f"round {turn}" if turn else "warm-up"
    words = ", ".join(f"{figure} {value:,.2f}" for figure, value in figures.items())
    print(f"{what} {name}: {words}", file=sys.stderr, flush=True)


def to_figures(rounds: Sequence[dict[str, Figures]]) -> dict[str, Any]:
    """Everything of a comparison as plain data."""
    ratios = make_ratios(rounds)
    best = best_peers(ratios)
    return {
        "median": make_medians(rounds),
        "spread": make_spreads(rounds),
        "ours_over_peer": ratios,
        "ours_over_best_peer": {
            figure: {"peer": peer, "ratio": ratios[figure][peer]} for figure, peer in best.items()
        },
        "rounds": list(rounds),
    }
