"""How soon a run trains: its first step with an empty and with a filled compile cache, where the seconds
before it go, and compile time against depth: one compiled block serves all layers, so it should not grow with
them."""

import argparse
import dataclasses
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.tools.bench.harness import KEYS, BenchResult
from meshwright.tools.bench.speed.peers import OURS, PEER_HELP, Contender, parse_peers
from meshwright.tools.bench.train_run import (
    SHAPE,
    STANDARD_SHAPE,
    Setup,
    config_to_record,
    measure_run,
    measure_run_in,
    resolve,
)
from meshwright.tools.cli import format_table, natural, positive
from meshwright.tools.processes import cache_environment, descendant_age_s

LATER_STEPS = 3
TINY_WIDTH = (
    "--model.dim=64",
    "--model.n_heads=4",
    "--model.n_kv_heads=4",
    "--model.ffn_dim=128",
    "--model.vocab_size=264",
    "--model.max_seq_len=64",
    "--train.seq_len=64",
    "--train.micro_batch_size=2",
    f"--train.steps={1 + LATER_STEPS}",
    "--data.source=stdlib",
    "--checkpoint.every=0",
    "--train.eval_every=0",
    "--metrics.tensorboard=false",
)


@dataclass(frozen=True)
class Compilation:
    """`compile_s`: seconds of the first optimizer step beyond those of the median later one."""

    layers: int
    compile_s: float
    first_step_s: float
    later_step_s: float
    startup_s: float


def depth_setup(layers: int, threads: int, overrides: Sequence[str]) -> Setup:
    """One process, a tiny width, so that what takes time is compiling."""
    return Setup(1, threads, [*TINY_WIDTH, *overrides, f"--model.n_layers={layers}"])


def run_depths(setups: dict[int, Setup], rounds: int) -> list[dict[int, Compilation]]:
    """Every round compiles every depth once, each with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-cache-") as name:
        results = []
        for turn in range(1, rounds + 1):
            result = {}
            for layers, setup in setups.items():
                result[layers] = _compile(
                    layers, setup, cache_environment("cold", Path(name), f"{layers}-layers", turn)
                )
                print(
                    f"round {turn} {layers} layers: {result[layers].compile_s:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
            results.append(result)
    return results


def median_seconds(rounds: Sequence[dict[int, Compilation]]) -> dict[int, float]:
    """Median compile seconds by depth."""
    return {layers: statistics.median(r[layers].compile_s for r in rounds) for layers in rounds[0]}


def median_ratio(rounds: Sequence[dict[int, Compilation]]) -> float:
    """Deepest / shallowest: the median of the ratios within each round."""
    return statistics.median(r[max(r)].compile_s / r[min(r)].compile_s for r in rounds)


def _compile(layers: int, setup: Setup, cache: dict[str, str]) -> Compilation:
    figures = measure_run(setup, cache)
    first, *later = figures.step_times_s
    later_s = statistics.median(later) if later else 0.0
    return Compilation(layers, first - later_s, first, later_s, figures.startup_s)


# a run says its versions once its plan is made
FIRST_LINE = re.compile(rb"^meshwright \d.*, torch ", re.MULTILINE)


@dataclass(frozen=True)
class Startup:
    """Seconds of the parts, one after the other, and `total_s` of all; None where the system does not tell.

    Args:
        launcher_s: until the first worker's process exists; 0 where there is no launcher
        imports_s: until the run's first line: imports, config, plan, process group
        setup_s: until the first step begins: data, model, weights
        compile_s: what the first step takes beyond a later one: compiling, or reading the cache
        step_s: a later step (median)
    """

    launcher_s: float | None
    imports_s: float | None
    setup_s: float | None
    compile_s: float
    step_s: float
    total_s: float


@dataclass
class Marks:
    """Moments seen from outside while a run starts, on the clock of time.perf_counter; 0 is not yet."""

    log: Path
    worker_at: float = 0.0
    spoke_at: float = 0.0

    def look(self) -> None:
        """Called all the time while the run runs."""
        if (
            not self.worker_at
            and (age_s := descendant_age_s(b"train.main", b"torch.distributed.run")) is not None
        ):
            self.worker_at = time.perf_counter() - age_s
        if not self.spoke_at and self.log.exists() and FIRST_LINE.search(self.log.read_bytes()):
            self.spoke_at = time.perf_counter()


def measure_startup(setup: Setup, cache: dict[str, str]) -> Startup:
    """Run it and split its start. Raises BenchError if it fails."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        marks, began_at = Marks(folder / "log"), time.perf_counter()
        figures = measure_run_in(folder, setup, cache, marks.look)
    first_s, *later = figures.step_times_s
    worker_s, spoke_s = (at - began_at if at else None for at in (marks.worker_at, marks.spoke_at))
    return split_start(figures.startup_s, worker_s, spoke_s, first_s, statistics.median(later or [0.0]))


def split_start(
    total_s: float, worker_s: float | None, spoke_s: float | None, first_s: float, later_s: float
) -> Startup:
    """The parts, from seconds since the command until the worker existed, until it spoke, and of the first
    and a later step."""
    return Startup(
        launcher_s=None if worker_s is None else max(0.0, worker_s),
        imports_s=None if worker_s is None or spoke_s is None else spoke_s - max(0.0, worker_s),
        setup_s=None if spoke_s is None else total_s - first_s - spoke_s,
        compile_s=first_s - later_s,
        step_s=later_s,
        total_s=total_s,
    )


SUMMARY = "seconds to the first step, cold and warm, and compile time against depth"
DESCRIPTION = (
    f"Start ours on the standard shape ({SHAPE}) with an empty compile cache and again with the cache that "
    "this has filled, and split the seconds from the command to the end of the first step: launcher, "
    "imports, set-up, compiling or reading the cache, the step. Peers in turn with it. Then compile models "
    "of several depths and a tiny width (dim 64, 4 heads, sequences of 64), one process, each with an empty "
    "cache: compile time is the first step's beyond a later one's."
)
EPILOG = (
    f"{KEYS} A peer prints `BENCH` lines as in `peers`, and keeps what it compiles in "
    "TORCHINDUCTOR_CACHE_DIR."
)
STEPS = 4
MODES = ("cold", "warm")
PARTS = tuple(field.name for field in dataclasses.fields(Startup))


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Options of `compile`."""
    parser.add_argument(
        "--processes", type=positive, default=2, metavar="N", help="processes of the run (default 2)"
    )
    parser.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="CPU threads per process (default 1)"
    )
    parser.add_argument(
        "--rounds", type=positive, default=2, metavar="N", help="cold and warm starts of each (default 2)"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help=PEER_HELP)
    parser.add_argument(
        "--layers", type=positive, nargs="+", default=[4, 32], metavar="N", help="depths (default 4 32)"
    )
    parser.add_argument(
        "--depth-rounds",
        type=natural,
        default=2,
        metavar="N",
        help="compilations of each depth (default 2; 0: none)",
    )


def measure_compile(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Starts, then depths."""
    keys = [*STANDARD_SHAPE, f"--train.steps={STEPS}", *overrides]
    setup, peers = Setup(options.processes, options.threads, keys), parse_peers(options.peer, options.threads)
    depths = {layers: depth_setup(layers, options.threads, overrides) for layers in options.layers}
    config = resolve(setup)
    for deep in depths.values():
        resolve(deep)
    figures = start_figures(start_rounds(setup, peers, options.rounds))
    figures |= {"processes": options.processes, "threads": options.threads}
    text = start_text(figures)
    if options.depth_rounds:
        figures["depth"] = depth_figures(depths, options.depth_rounds)
        text += f"\n\n{depth_text(figures['depth'])}"
    return BenchResult(config_to_record(config), figures, text)


def start_rounds(
    setup: Setup, peers: Sequence[Contender], rounds: int
) -> list[dict[str, dict[str, dict[str, float | None]]]]:
    """Every round starts all of them with an empty cache of their own, then all with what this has left in
    it: seconds of the parts of ours, `total_s` of all, by mode and name."""
    found = []
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-cache-") as name:
        for turn in range(rounds):
            result: dict[str, dict[str, dict[str, float | None]]] = {mode: {} for mode in MODES}
            for mode in MODES:
                cache = {
                    who: cache_environment("cold", Path(name), who, turn)
                    for who in (OURS, *(p.name for p in peers))
                }
                result[mode][OURS] = dataclasses.asdict(measure_startup(setup, cache[OURS]))
                result[mode] |= {
                    peer.name: {"total_s": peer.run(cache[peer.name])["startup_s"]} for peer in peers
                }
                words = ", ".join(
                    f"{who} {seconds['total_s']:.2f} s" for who, seconds in result[mode].items()
                )
                print(f"round {turn + 1} {mode}: {words}", file=sys.stderr, flush=True)
            found.append(result)
    return found


def start_figures(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians by mode and name, (largest - smallest) of the totals, and ours / each peer within the
    rounds."""
    figures: dict[str, Any] = {}
    for mode in MODES:
        names = list(rounds[0][mode])
        totals = {name: [r[mode][name]["total_s"] for r in rounds] for name in names}
        figures[mode] = {
            "median": {
                name: {
                    part: _median([r[mode][name].get(part) for r in rounds]) for part in rounds[0][mode][name]
                }
                for name in names
            },
            "spread_s": {name: max(all_s) - min(all_s) for name, all_s in totals.items()},
            "ours_over_peer": {
                name: statistics.median(a / b for a, b in zip(totals[OURS], totals[name], strict=True))
                for name in names
                if name != OURS
            },
        }
    return {**figures, "rounds": list(rounds)}


def start_text(figures: dict[str, Any]) -> str:
    """Seconds by part of ours and, in all, of the peers."""
    head = ["seconds", *(part.removesuffix("_s").replace("_", " ") for part in PARTS), "spread", "ours / it"]
    rows = []
    for mode in MODES:
        for name, median in figures[mode]["median"].items():
            cells = ["-" if median.get(part) is None else f"{median[part]:.2f}" for part in PARTS]
            ratio = figures[mode]["ours_over_peer"].get(name)
            rows.append(
                [
                    f"{name}, {mode}",
                    *cells,
                    f"{figures[mode]['spread_s'][name]:.2f}",
                    f"{ratio:.3f}" if ratio else "-",
                ]
            )
    last = f"median of {len(figures['rounds'])} rounds; total: from the command to the end of the first step"
    return f"{format_table(head, rows)}\n\n{last}"


def depth_figures(setups: dict[int, Setup], rounds: int) -> dict[str, Any]:
    """Compile time by depth."""
    results = run_depths(setups, rounds)
    raw = [[dataclasses.asdict(compilation) for compilation in r.values()] for r in results]
    return {
        "median_compile_s": median_seconds(results),
        "deepest_over_shallowest": median_ratio(results),
        "rounds": raw,
    }


def depth_text(figures: dict[str, Any]) -> str:
    """The table, and the deepest against the shallowest."""
    seconds = figures["median_compile_s"]
    table = format_table(
        ("layers", "compile s"), [(str(layers), f"{s:.2f}") for layers, s in seconds.items()]
    )
    return (
        f"{table}\n\n{max(seconds)} layers / {min(seconds)} layers: {figures['deepest_over_shallowest']:.2f} "
        f"(median of {len(figures['rounds'])} rounds)"
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
