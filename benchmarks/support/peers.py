"""Compare a run of this trainer with other trainers, interleaved: A B C A B C ..."""

import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.train import Setup, cache_environment, measure_run, spread
from meshwright.tools.processes import BenchError, make_environment, run_to_end

OURS = "meshwright"
PEER_HELP = "a shell command line, such as titan='TT_COMPILE=1 bash run.sh'; may be given several times"
# figures of a run, and their form in a BENCH line
FIGURES = {
    "tokens_per_s_per_rank": r"tok/s/rank median=(\S+)",
    "peak_memory_gib": r"peak_\w+_GiB=(\S+)",
    "startup_s": r"startup_to_first_step_s=(\S+)",
}

Figures = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """A trainer: its name, and a function that runs it with the variables of its compile cache."""

    name: str
    run: Callable[[dict[str, str]], Figures]


def ours(setup: Setup) -> Contender:
    """Return this trainer, a run of train.main, as a contender."""

    def run(cache: dict[str, str]) -> Figures:
        figures = measure_run(setup, cache)
        return {name: getattr(figures, name) for name in FIGURES}

    return Contender(OURS, run)


def parse_peers(texts: Sequence[str], threads: int, variables: Mapping[str, str]) -> list[Contender]:
    """Return the contenders of NAME=COMMAND texts; their commands get `variables` as environment variables.
    Raises BenchError."""
    peers: list[Contender] = []
    for text in texts:
        name, _, command = (part.strip() for part in text.partition("="))
        if not re.fullmatch(r"\w[\w.-]*", name) or not command:
            raise BenchError(f"--peer {text!r}: expected NAME='COMMAND', such as --peer titan='bash run.sh'")
        if name == OURS or name in (peer.name for peer in peers):
            raise BenchError(f"--peer {name}: this name is already used: give every peer a different name")
        peers.append(_peer(name, command, threads, variables))
    return peers


def parse_bench_lines(text: str) -> Figures:
    """Return the figures in the `BENCH key=value ...` lines of all ranks: median speed, maximum memory, and
    maximum start-up time.

    A line may have torchrun's prefix, such as `[rank0]:`. Raises BenchError that names missing figures.
    """
    lines = "\n".join(re.findall(r"^(?:\[\S+\]:\s*)?BENCH\b(.*)$", text, re.MULTILINE))
    by_figure = {
        figure: [_number(value) for value in re.findall(pattern, lines)]
        for figure, pattern in FIGURES.items()
    }
    missing = [FIGURES[figure].replace(r"(\S+)", "...") for figure, values in by_figure.items() if not values]
    if missing:
        raise BenchError(f"its output has no BENCH line with {' or '.join(missing)}: see benchmarks.cpu -h")
    return {
        figure: statistics.median(values) if figure == "tokens_per_s_per_rank" else max(values)
        for figure, values in by_figure.items()
    }


def run_rounds(
    contenders: Sequence[Contender], rounds: int, cache: str
) -> tuple[list[dict[str, Figures]], dict[str, str]]:
    """Run all contenders in turn. Returns the figures of every round by contender, and the errors of failed
    contenders, which are left out of all rounds.

    With cache "warm" each contender has an additional first run that is not counted. Raises BenchError if
    this trainer fails.
    """
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-cache-") as temporary:
        folder, results = Path(temporary), []
        for turn in range(0 if cache == "warm" else 1, rounds + 1):
            result = {}
            for contender in contenders:
                name = contender.name
                if name in left_out:
                    continue
                try:
                    result[name] = contender.run(cache_environment(cache, folder, name, turn))
                    _print_progress(turn, name, result[name])
                except BenchError as error:
                    if name == OURS:
                        raise
                    left_out[name] = str(error)
            if turn:
                results.append(result)
    return [{name: figures for name, figures in r.items() if name not in left_out} for r in results], left_out


def make_medians(rounds: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """Return the medians over the rounds, by contender."""
    return {
        name: {figure: statistics.median(r[name][figure] for r in rounds) for figure in FIGURES}
        for name in rounds[0]
    }


def make_spreads(rounds: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """Return (largest - smallest) / median over the rounds, by contender."""
    medians = make_medians(rounds)
    return {
        name: {figure: spread([r[name][figure] for r in rounds], medians[name][figure]) for figure in FIGURES}
        for name in rounds[0]
    }


def make_ratios(rounds: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """Return the ratios of this trainer's figures to each peer's: the median of the ratios within each round,
    so that a drift of the machine's speed cancels."""
    peers = [name for name in rounds[0] if name != OURS]
    return {
        figure: {peer: statistics.median(r[OURS][figure] / r[peer][figure] for r in rounds) for peer in peers}
        for figure in FIGURES
    }


def _peer(name: str, command: str, threads: int, variables: Mapping[str, str]) -> Contender:
    def run(cache: dict[str, str]) -> Figures:
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
            log = Path(folder) / "log"
            try:
                run_to_end(command, make_environment(threads, {**variables, **cache}), log, lambda: None)
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
        raise BenchError(f"a BENCH line in its output has {text!r} instead of a positive number")
    return value


def _print_progress(turn: int, name: str, figures: Figures) -> None:
    """Print a line of progress to stderr."""
    label = f"round {turn}" if turn else "warm-up"
    values = ", ".join(f"{figure} {value:,.2f}" for figure, value in figures.items())
    print(f"{label} {name}: {values}", file=sys.stderr, flush=True)


def to_figures(rounds: Sequence[dict[str, Figures]]) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {
        "median": make_medians(rounds),
        "spread": make_spreads(rounds),
        "ours_over_peer": make_ratios(rounds),
        "rounds": list(rounds),
    }
