"""Predict how runs scale from 8 to thousands of GPUs, by the planner's choice and by FSDP alone; and with
`--write` make every predicted figure of README.md and docs/scaling.md again."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

from benchmarks.support.documents import ROOT, refresh_outputs, replace_part
from benchmarks.support.harness import BenchResult, Measurement, run_benchmark
from benchmarks.support.scaling_plot import draw_scaling
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.accuracy import trust
from meshwright.parallel.planner.hardware import Hardware, machines_of_kind
from meshwright.parallel.planner.timeline_plot import picture_bytes
from meshwright.tools.cli import positive
from meshwright.tools.plan.report import find_kind
from meshwright.tools.plan.scaling import predict_on, read_sweep
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import Prediction

WAYS = {"planner": (), "fsdp": ("--parallel.dp_replicate=1", "--parallel.tp=1")}
PER_NODE, SEQUENCES = 8, 2  # GPUs of a node; sequences of the global batch per GPU
KEPT_AT = 1024  # GPUs of the first table
SHOWN = (1024, 4096)  # GPUs of the rows in docs/scaling.md, besides the fewest that fit
PAGE, PICTURE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "scaling.svg"
FIGURES = ("recomputed", "tokens/s", "MFU", "exposed", "GiB")
HEAD = ("kind", "GPUs", "planner: tp x replicate x shard", *FIGURES, f"FSDP: {FIGURES[0]}", *FIGURES[1:])
KEPT = ("MFU on 1,024", "of the fewest's", "of the best", "FSDP alone", "of the best")
KEPT_HEAD = ("model", "kind", "fewest GPUs, MFU", "best, MFU", *KEPT)


@dataclass(frozen=True)
class ScalingRow:
    """The predictions for one model, kind and number of GPUs: the planner's choice, and FSDP alone; or the
    reason why no plan fits."""

    model: str
    kind: str
    gpus: int
    chosen: Prediction | str
    alone: Prediction | str

    def cells(self) -> list[str]:
        """Return the row of the model's table."""
        mesh = "-"
        if isinstance(self.chosen, Prediction):
            degrees = self.chosen.plan.mesh
            mesh = f"{degrees.tp} x {degrees.dp_replicate} x {degrees.dp_shard}"
        return [self.kind, f"{self.gpus:,}", mesh, *figures(self.chosen), *figures(self.alone)]


def figures(predicted: Prediction | str) -> list[str]:
    """Return the cells of a prediction."""
    if isinstance(predicted, str):
        return ["does not fit", *"----"]
    units = predicted.plan.units[1:-1]
    modes = [mode for unit in units if (mode := unit.activation_checkpoint) != "none"]
    some = f", {len(modes)} of {len(units)}" if 0 < len(modes) < len(units) else ""
    return [
        (modes[0] if modes else "none") + some,
        f"{predicted.tokens_per_s_per_gpu:,.0f}",
        f"{predicted.mfu:.1%}",
        f"{predicted.timeline.exposed_share:.1%}",
        f"{predicted.reserved_bytes / GIB:.1f}",
    ]


def predict_row(
    model: str, hardware: Hardware, gpus: int, sequences: int = SEQUENCES, keys: Sequence[str] = ()
) -> ScalingRow:
    """Predict the planner's choice and FSDP alone."""
    batch = f"--train.global_batch_size={gpus * sequences}"
    both = []
    for way in WAYS.values():
        arguments = [f"--config={model}", "--parallel.plan=auto", batch, *keys, *way]
        both.append(predict_on(parse_config(arguments).job, machines_of_kind(hardware, gpus, PER_NODE)))
    return ScalingRow(Path(model).stem, hardware.name, gpus, *both)


def tables(rows: Sequence[ScalingRow], shown: Sequence[int] = ()) -> Iterator[str]:
    """Yield Markdown tables: what is kept on KEPT_AT GPUs, if they are among the rows, then one of each
    model; of each kind the fewest GPUs and those `shown`, or all."""
    fit = [row for row in rows if not (isinstance(row.chosen, str) and isinstance(row.alone, str))]
    groups = [(key, list(same)) for key, same in groupby(fit, lambda row: (row.model, row.kind))]
    if kept := [kept_row for _, same in groups if (kept_row := kept_cells(same))]:
        yield table(KEPT_HEAD, kept)
    for model, of_model in groupby(groups, lambda group: group[0][0]):
        cells = [
            row.cells()
            for _, same in of_model
            for i, row in enumerate(same)
            if not (i and shown) or row.gpus in shown
        ]
        yield f"**{model}**\n\n{table(HEAD, cells)}"


def kept_cells(rows: Sequence[ScalingRow]) -> list[str]:
    """Return the planner's MFU on the fewest GPUs, the best one up to KEPT_AT GPUs, and what of both is left
    on KEPT_AT, by the planner's choice and of the best by FSDP alone; nothing without that number."""
    chosen = {
        row.gpus: row.chosen.mfu or 0.0
        for row in rows
        if isinstance(row.chosen, Prediction) and row.gpus <= KEPT_AT
    }
    if KEPT_AT not in chosen:
        return []
    fewest, best, here = min(chosen), max(chosen, key=lambda gpus: chosen[gpus]), chosen[KEPT_AT]
    alone = next(row.alone for row in rows if row.gpus == KEPT_AT)
    mfu = None if isinstance(alone, str) else alone.mfu
    return [
        rows[0].model,
        rows[0].kind,
        *(f"{gpus:,}: {chosen[gpus]:.1%}" for gpus in (fewest, best)),
        *(f"{share:.1%}" for share in (here, here / chosen[fewest], here / chosen[best])),
        *((f"{mfu:.1%}", f"{mfu / chosen[best]:.1%}") if mfu else "--"),
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def write_pages(rows: Sequence[ScalingRow]) -> None:
    """Write the tables and the picture of docs/scaling.md, and the outputs of commands in the pages."""
    points = {(row.model, row.kind, row.gpus): (_points(row.chosen), _points(row.alone)) for row in rows}
    PICTURE.write_bytes(picture_bytes(draw_scaling(points), ".svg"))
    picture = f"![Predicted MFU and exposed share, by number of GPUs]({PICTURE.name})"
    replace_part(PAGE, "\n\n".join([picture, *tables(rows, SHOWN)]))
    refresh_outputs()


def _points(predicted: Prediction | str) -> Mapping[str, float] | None:
    if isinstance(predicted, str):
        return None
    return {"mfu": predicted.mfu or 0.0, "exposed_share": predicted.timeline.exposed_share}


def add_scaling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `scaling`."""
    add, models, kinds = parser.add_argument, ["llama_8b", "llama_70b", "llama_405b"], ["h100-sxm", "h200"]
    add("--config", nargs="+", default=models, metavar="NAME", help=f"default {' '.join(models)}")
    add("--gpu", nargs="+", default=kinds, metavar="KIND", help=f"default {' '.join(kinds)}")
    add("--gpus", default="8..4096", metavar="A..B", help="doublings from A to B (default 8..4096)")
    text = f"sequences of the global batch per GPU (default {SEQUENCES}, as in torchtitan's published runs)"
    add("--sequences-per-gpu", type=positive, default=SEQUENCES, metavar="N", help=text)
    text = "write docs/scaling.md, its picture and README.md: takes as long as all defaults"
    add("--write", action="store_true", help=text)


def measure_scaling(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Predict all cases."""
    rows = []
    kinds = [find_kind(name, "--gpu") for name in options.gpu]
    for model, kind, gpus in product(options.config, kinds, read_sweep(f"gpus={options.gpus}")):
        rows.append(predict_row(model, kind, gpus, options.sequences_per_gpu, overrides))
        print(model, kind.name, gpus, file=sys.stderr, flush=True)
    if options.write:
        write_pages(rows)
    reasons = [
        f"{row.model}, {row.gpus} {row.kind}: {row.chosen}" for row in rows if isinstance(row.chosen, str)
    ]
    errors = [f"{kind.name}: {text}" for kind in kinds for _, text in trust(kind, max(SHOWN), PER_NODE)]
    parts = ["predicted; nothing is measured", *errors]
    shown = {"rows": [[row.model, *row.cells()] for row in rows]}
    return BenchResult(None, shown, "\n\n".join([*tables(rows), "\n".join(reasons), "\n".join(parts)]))


MEASUREMENT = Measurement(
    "scaling",
    add_scaling_options,
    measure_scaling,
    description=(
        "Plan configs for kinds and numbers of GPUs in two ways: with the degrees that the planner chooses, "
        "and with FSDP alone (dp_replicate and tp are 1; the planner chooses the rest). The global batch "
        "grows with the number of GPUs. Print tokens per second per GPU, MFU, the share of a step that waits "
        "for communication, and memory. Nothing is run or measured."
    ),
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
