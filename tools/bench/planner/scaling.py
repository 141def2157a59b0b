"""How runs scale, as the planner predicts it: its own choice, and FSDP alone, on 8 to thousands of GPUs. A
loop over what `tools.plan --sweep` does, as the tables and the picture of docs/scaling.md."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.bench.harness import BenchResult, Measurement
from meshwright.tools.bench.planner.scaling_plot import draw_scaling
from meshwright.tools.bench.train_run import config_to_record
from meshwright.tools.cli import positive
from meshwright.tools.plan.report import find_gpu
from meshwright.tools.plan.scaling import read_sweep, sweep
from meshwright.train.config import Config, TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError

WAYS = {"planner": (), "fsdp": ("--parallel.dp_replicate=1", "--parallel.tp=1")}
BEGIN, END = (f"<!-- written by tools.bench scale: {end} -->" for end in ("begin", "end"))
SHOWN = (8, 1024, 4096)  # numbers of GPUs in the page; the record has all
KEPT_AT = 1024  # GPUs at which the share of the best that is kept is stated
FIGURES = ("recomputed", "tokens/s", "MFU", "exposed", "GiB")
HEAD = (
    "kind",
    "GPUs",
    "planner: tp x replicate x shard",
    *FIGURES,
    f"FSDP: {FIGURES[0]}",
    *FIGURES[1:],
)
KEPT_HEAD = (
    "model",
    "kind",
    "fewest GPUs, MFU",
    "best, MFU",
    f"MFU on {KEPT_AT:,}",
    "of the fewest's",
    "of the best",
    "FSDP alone",
    "of the best",
)
Cell = Mapping[str, Any]  # what is predicted of one model, kind, number of GPUs and way


def add_scale_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scale`."""
    add, models, kinds = parser.add_argument, ["llama_8b", "llama_70b", "llama_405b"], ["h100-sxm", "h200"]
    add("--config", nargs="+", default=models, metavar="NAME", help=f"default {' '.join(models)}")
    words = f"files of configs/hardware (default {' '.join(kinds)})"
    add("--gpu", nargs="+", default=kinds, metavar="KIND", help=words)
    add("--gpus", default="8..4096", metavar="A..B", help="doublings from A to B (default 8..4096)")
    add("--gpus-per-node", type=positive, default=8, metavar="N", help="default 8")
    words = "of the global batch, for each GPU (default 2, as in torchtitan's published runs)"
    add("--sequences-per-gpu", type=positive, default=2, metavar="N", help=words)
    words = "write tables and picture into this page, between its marks; the picture beside it"
    add("--page", type=Path, metavar="FILE.md", help=words)


def measure_scale(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """All cases. Raises ConfigError for what cannot be begun."""
    if any(override.startswith("--parallel.plan=") for override in overrides):
        raise ConfigError(
            "--parallel.plan: scale lets the planner choose. Fix single keys, as --parallel.tp=8, instead"
        )
    counts, kinds = read_sweep(f"gpus={options.gpus}"), [find_gpu(name) for name in options.gpu]
    around = split_page(options.page) if options.page else ("", "")
    configs, cases = dict[str, Any](), dict[str, Cell]()
    for name, hardware, gpus, way in product(options.config, kinds, counts, WAYS):
        began_at = time.monotonic()
        config = make_config(name, gpus * options.sequences_per_gpu, [*overrides, *WAYS[way]])
        configs[Path(name).stem] = config_to_record(config)
        case = {"config": Path(name).stem, "gpu": hardware.name, "gpus": gpus, "way": way}
        label = " ".join(map(str, case.values()))
        cases[label] = {
            **case,
            "n_layers": config.model.n_layers,
            **predict_best(config.job, gpus, min(gpus, options.gpus_per_node), hardware),
        }
        print(f"{label}: {time.monotonic() - began_at:.0f} s", file=sys.stderr, flush=True)
    settings = {"gpus_per_node": options.gpus_per_node, "sequences_per_gpu": options.sequences_per_gpu}
    figures = {"predicted": True, "settings": settings, "cases": cases}
    if options.page:
        write_page(options.page, around, list(cases.values()))
    return BenchResult(configs, figures, scale_text(list(cases.values())))


def make_config(name: str, sequences: int, keys: Sequence[str]) -> Config:
    """The config with everything that is not fixed left to the planner. Raises ConfigError."""
    batch = f"--train.global_batch_size={sequences}"
    return parse_config([f"--config={name}", "--parallel.plan=auto", batch, *keys], "tools.bench")


def predict_best(job: TrainingJob, gpus: int, gpus_per_node: int, hardware: Hardware) -> dict[str, Any]:
    """What is predicted of the best plan, as plain data, or why there is none."""
    try:
        (row,) = sweep(job, [gpus], gpus_per_node, hardware).rows
    except PlanError as error:  # its last line is GPUS: REASON
        return {"fits": False, "reason": str(error).splitlines()[-1].partition(": ")[2]}
    assert row.plan is not None, "a sweep without a plan is a PlanError"
    assert row.prediction is not None, "a plan has a prediction"
    timeline = row.prediction.timeline
    return {
        "fits": True,
        "choices": choices_of(row.plan),
        "tokens_per_s_per_gpu": row.prediction.tokens_per_s_per_gpu,
        "mfu": row.prediction.mfu,
        "mfu_causal": row.prediction.mfu_causal,
        "step_time_s": timeline.step_s,
        "exposed_share": timeline.exposed_share,
        "exposed_by_lane_s": dict(timeline.exposed_by_lane),
        "reserved_gib": row.prediction.reserved_bytes / GIB,
    }


def choices_of(plan: Plan) -> dict[str, Any]:
    """Degrees, micro batches, and what is recomputed of how many blocks."""
    modes = [mode for unit in plan.units if (mode := unit.activation_checkpoint) != "none"]
    return {
        **{axis: getattr(plan.mesh, axis) for axis in ("tp", "dp_replicate", "dp_shard")},
        "activation_checkpoint": modes[0] if modes else "none",
        "activation_checkpoint_blocks": len(modes),
        "micro_batch_size": plan.micro_batch_size,
        "accumulation": plan.accumulation,
    }


def pairs(cells: Sequence[Cell]) -> Iterator[tuple[str, str, list[tuple[Cell, Cell]]]]:
    """Model, kind of GPU, and for each number of GPUs on which one of them fits the planner's choice and FSDP
    alone."""
    for (model, gpu), group in groupby(cells, key=lambda cell: (cell["config"], cell["gpu"])):
        by_way = [{cell["way"]: cell for cell in same} for _, same in groupby(group, lambda c: c["gpus"])]
        both = [(cell["planner"], cell["fsdp"]) for cell in by_way]
        yield model, gpu, [pair for pair in both if any(cell["fits"] for cell in pair)]


def row_of(chosen: Cell, alone: Cell) -> list[str]:
    """One number of GPUs."""
    degrees = [str(chosen["choices"][axis]) for axis in ("tp", "dp_replicate", "dp_shard") if chosen["fits"]]
    mesh = " x ".join(degrees) or "-"
    return [chosen["gpu"], f"{chosen['gpus']:,}", mesh, *_figures(chosen), *_figures(alone)]


def _figures(cell: Cell) -> list[str]:
    if not cell["fits"]:
        return ["does not fit", *"----"]
    return [
        recomputed(cell["choices"], cell["n_layers"]),
        f"{cell['tokens_per_s_per_gpu']:,.0f}",
        f"{cell['mfu']:.1%}",
        f"{cell['exposed_share']:.1%}",
        f"{cell['reserved_gib']:.1f}",
    ]


def recomputed(choices: Mapping[str, Any], n_layers: int) -> str:
    """What is checkpointed, and how many blocks, where it is not all of them."""
    of_old_records = choices.get("checkpointed_blocks", "auto")  # the key's former name
    mode = choices["activation_checkpoint"]
    blocks = choices.get("activation_checkpoint_blocks", of_old_records)
    return f"{mode}" if mode == "none" or blocks in ("auto", n_layers) else f"{mode}, {blocks} of {n_layers}"


def kept_row(model: str, gpu: str, both: Sequence[tuple[Cell, Cell]]) -> list[str] | None:
    """The planner's MFU on the fewest GPUs, the best one up to KEPT_AT GPUs, and what of both is left at
    KEPT_AT, by the planner's choice and of the best by FSDP alone; None where KEPT_AT was not asked for."""
    chosen = [cell for cell, _ in both if cell["fits"] and cell["gpus"] <= KEPT_AT]
    if not chosen or chosen[-1]["gpus"] != KEPT_AT:
        return None
    alone = next(cell for _, cell in both if cell["gpus"] == KEPT_AT)
    fewest, best, here = chosen[0], max(chosen, key=lambda cell: float(cell["mfu"])), chosen[-1]["mfu"]
    return [
        model,
        gpu,
        *(f"{cell['gpus']:,}: {cell['mfu']:.1%}" for cell in (fewest, best)),
        f"{here:.1%}",
        f"{here / fewest['mfu']:.1%}",
        f"{here / best['mfu']:.1%}",
        *((f"{mfu:.1%}" for mfu in (alone["mfu"], alone["mfu"] / best["mfu"])) if alone["fits"] else "--"),
    ]


def tables(cells: Sequence[Cell], shown: Sequence[int] = ()) -> Iterator[str]:
    """Markdown: what is kept at KEPT_AT, then a table for each model; of each kind the fewest GPUs and those
    `shown`, or all."""
    kept = [row for group in pairs(cells) if (row := kept_row(*group))]
    if kept:
        yield _table(KEPT_HEAD, kept)
    for model, same in groupby(pairs(cells), key=lambda group: group[0]):
        rows = [
            row_of(*pair)
            for _, _, both in same
            for i, pair in enumerate(both)
            if not (i and shown) or pair[0]["gpus"] in shown
        ]
        if rows:
            yield f"**{model}**\n\n{_table(HEAD, rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def scale_text(cells: Sequence[Cell]) -> str:
    """All tables, and why there is no plan where there is none."""
    reasons = [
        f"{c['config']}, {c['gpus']} {c['gpu']}, {c['way']}: {c['reason']}" for c in cells if not c["fits"]
    ]
    files = " and ".join(sorted({f"configs/hardware/{cell['gpu']}.yaml" for cell in cells}))
    last = f"predicted with {files}; nothing of it is measured"
    return "\n\n".join([*tables(cells), *(["\n".join(reasons)] if reasons else []), last])


def page_part(cells: Sequence[Cell], picture: str) -> str:
    """What stands between a page's marks."""
    return "\n\n".join(
        [f"![Predicted MFU and exposed share, by number of GPUs]({picture})", *tables(cells, SHOWN)]
    )


def split_page(page: Path) -> tuple[str, str]:
    """What stands before and behind its marks. Raises ConfigError for what is no page, or has no marks."""
    if not page.is_file():
        raise ConfigError(f"--page={page}: there is no such file")
    text = page.read_text(encoding="utf-8")
    if not 0 <= text.find(BEGIN) < text.find(END):
        raise ConfigError(
            f"--page={page}: it must have the lines {BEGIN} and {END}, between which the tables go"
        )
    return text.partition(BEGIN)[0], text.partition(END)[2]


def write_page(page: Path, around: tuple[str, str], cells: Sequence[Cell]) -> None:
    """Tables into the page, and the picture beside it."""
    picture = page.with_suffix(".svg")
    part = page_part(cells, picture.name)
    page.write_text(f"{around[0]}{BEGIN}\n\n{part}\n\n{END}{around[1]}", encoding="utf-8")
    picture.write_text(to_svg(draw_scaling(list(pairs(cells)))), encoding="utf-8")


MEASUREMENT = Measurement(
    "scale",
    add_scale_options,
    measure_scale,
    summary="predicted speed and memory on 8 to 4,096 GPUs",
    description=(
        "Plan configs for kinds and numbers of GPUs, twice: with the degrees that the planner chooses, and "
        "with FSDP alone (dp_replicate and tp 1; the rest is chosen). The global batch grows with the GPUs. "
        "Says what is predicted of each: tokens per second and GPU, MFU, the share of a step that waits for "
        "communication, memory, degrees. Nothing runs; all is prediction."
    ),
)
