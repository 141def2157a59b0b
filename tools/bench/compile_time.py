"""How soon a run trains: its first step with an empty and with a filled compile cache, and compile time
against depth."""

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.tools.bench.compile_depth import depth_setup, median_ratio, median_seconds, run_depths
from meshwright.tools.bench.measurement import KEYS, Result
from meshwright.tools.bench.peers import OURS, PEER_HELP, Contender, parse_peers
from meshwright.tools.bench.processes import cache_environment
from meshwright.tools.bench.run import STANDARD_SHAPE, Setup, config_to_record, resolve
from meshwright.tools.bench.standard import SHAPE
from meshwright.tools.bench.startup import Startup, measure_startup
from meshwright.tools.command import format_table, natural, positive

SUMMARY = "seconds to the first step, cold and warm, and compile time against depth"
DESCRIPTION = (
    f"Start ours on the standard shape ({SHAPE}) with an empty compile cache and again with the cache that "
    f"this has filled, and "
    "split the seconds from the command to the end of the first step: launcher, imports, set-up, compiling "
    "or reading the "
    "cache, the step. Peers in turn with it. Then compile models of several depths and a tiny width (dim 64, "
    "4 heads, "
    "sequences of 64), one process, each with an empty cache: compile time is the first step's beyond a "
    "later one's."
)
EPILOG = (
    f"{KEYS} A peer prints `BENCH` lines as in `peers`, and keeps what it compiles in "
    f"TORCHINDUCTOR_CACHE_DIR."
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


def measure_compile(options: argparse.Namespace, overrides: Sequence[str]) -> Result:
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
    return Result(config_to_record(config), figures, text)


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
