"""A run of ours against other trainers, interleaved: A B C A B C ..."""

import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.tools.bench.train_run import Setup, measure_run, spread
from meshwright.tools.processes import BenchError, cache_environment, make_environment, run_to_end

OURS = "meshwright"
PEER_HELP = "a shell command line, as titan='TT_COMPILE=1 bash run.sh'; may be given several times"
# figures of a run, and how a BENCH line says them
FIGURES = {
    "tokens_per_s_per_rank": r"tok/s/rank median=(\S+)",
    "peak_memory_gib": r"peak_\w+_GiB=(\S+)",
    "startup_s": r"startup_to_first_step_s=(\S+)",
}

Figures = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """A trainer under its name; `run` takes the environment variables of its compile cache."""

    name: str
    run: Callable[[dict[str, str]], Figures]


def ours(setup: Setup) -> Contender:
    """A run of train.main."""

    def run(cache: dict[str, str]) -> Figures:
        figures = measure_run(setup, cache)
        return {name: getattr(figures, name) for name in FIGURES}

    return Contender(OURS, run)


def parse_peers(texts: Sequence[str], threads: int, variables: Mapping[str, str]) -> list[Contender]:
    """Contenders from NAME=COMMAND texts, whose commands get these environment variables. Raises
    BenchError."""
    peers: list[Contender] = []
    for text in texts:
        name, _, command = (part.strip() for part in text.partition("="))
        if not re.fullmatch(r"\w[\w.-]*", name) or not command:
            raise BenchError(f"--peer {text!r} must read NAME='COMMAND', as --peer titan='bash run.sh'")
        if name == OURS or name in (peer.name for peer in peers):
            raise BenchError(f"--peer {name}: this name is taken. Give every peer a name of its own")
        peers.append(_peer(name, command, threads, variables))
    return peers


def parse_bench_lines(text: str) -> Figures:
    """Figures of the `BENCH key=value ...` lines of all ranks: the median speed, the most memory, the latest
    start.

    A line may carry torchrun's prefix, such as `[rank0]:`. Raises BenchError naming what is missing.
    """
    lines = "\n".join(re.findall(r"^(?:\[\S+\]:\s*)?BENCH\b(.*)$", text, re.MULTILINE))
    found = {
        figure: [_number(value) for value in re.findall(pattern, lines)]
        for figure, pattern in FIGURES.items()
    }
    missing = [FIGURES[figure].replace(r"(\S+)", "...") for figure, values in found.items() if not values]
    if missing:
        raise BenchError(f"its output has no BENCH line with {' nor '.join(missing)}")
    return {
        figure: statistics.median(values) if figure == "tokens_per_s_per_rank" else max(values)
        for figure, values in found.items()
    }


def run_rounds(
    contenders: Sequence[Contender], rounds: int, cache: str
) -> tuple[list[dict[str, Figures]], dict[str, str]]:
    """Figures of every round by contender, and the contenders that failed with what they said: they are left
    out of all rounds. Each gets one run that does not count where the cache is to be warm. Raises BenchError
    where ours fails."""
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
                    _say(turn, name, result[name])
                except BenchError as error:
                    if name == OURS:
                        raise
                    left_out[name] = str(error)
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


def make_ratios(rounds: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """Ours / peer's, of every figure by peer: the median of the ratios within each round, so that a machine
    that drifts hurts neither."""
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
        raise BenchError(f"its BENCH lines say {text!r} where a positive number must be")
    return value


def _say(turn: int, name: str, figures: Figures) -> None:
    """Progress, on stderr."""
    what = f"round {turn}" if turn else "warm-up"
    words = ", ".join(f"{figure} {value:,.2f}" for figure, value in figures.items())
    print(f"{what} {name}: {words}", file=sys.stderr, flush=True)


def to_figures(rounds: Sequence[dict[str, Figures]]) -> dict[str, Any]:
    """Everything of a comparison as plain data."""
    return {
        "median": make_medians(rounds),
        "spread": make_spreads(rounds),
        "ours_over_peer": make_ratios(rounds),
        "rounds": list(rounds),
    }
