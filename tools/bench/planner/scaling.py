"""Predict how runs scale from 8 to thousands of GPUs, with the planner's choice and with FSDP alone: the
tables and the picture of docs/scaling.md, from the search of `tools.plan --sweep`."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.timeline_plot import picture_bytes
from meshwright.tools.bench.harness import BenchResult, Measurement
from meshwright.tools.bench.planner.scaling_plot import draw_scaling
from meshwright.tools.bench.train_run import config_to_record
from meshwright.tools.cli import positive
from meshwright.tools.plan.export import check_target, write_atomically
from meshwright.tools.plan.report import find_kind
from meshwright.tools.plan.scaling import read_sweep, row_json, sweep
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.model.choose import source_of

WAYS = {"planner": (), "fsdp": ("--parallel.dp_replicate=1", "--parallel.tp=1")}
GPUS_PER_NODE = 8
FIGURES = ("recomputed", "tokens/s", "MFU", "exposed", "GiB")
HEAD = ("kind", "GPUs", "planner: tp x replicate x shard", *FIGURES, f"FSDP: {FIGURES[0]}", *FIGURES[1:])
Cell = Mapping[str, Any]  # the prediction for one model, kind of GPU, number of GPUs and way


def add_scale_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `scale`."""
    add, models, kinds = parser.add_argument, ["llama_8b", "llama_70b", "llama_405b"], ["h100-sxm", "h200"]
    add(
        "--config",
        nargs="+",
        default=models,
        metavar="NAME",
        help=f"configs to plan (default {' '.join(models)})",
    )
    text = f"files of configs/hardware (default {' '.join(kinds)})"
    add("--gpu", nargs="+", default=kinds, metavar="KIND", help=text)
    add("--gpus", default="8..4096", metavar="A..B", help="doublings from A to B (default 8..4096)")
    text = "sequences of the global batch per GPU (default 2, as in torchtitan's published runs)"
    add("--sequences-per-gpu", type=positive, default=2, metavar="N", help=text)
    text = "draw MFU and exposed share into this file, .svg or .png"
    add("--picture", type=Path, metavar="FILE", help=text)


def measure_scale(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Predict all cases. Raises ConfigError for wrong options."""
    if any(override.startswith("--parallel.plan=") for override in overrides):
        raise ConfigError(
            "--parallel.plan: scale always lets the planner choose: set single keys instead, such as "
            "--parallel.tp=8"
        )
    if options.picture:
        check_target("--picture", options.picture, (".svg", ".png"), overwrites=True)
    counts, kinds = read_sweep(f"gpus={options.gpus}"), [find_kind(name, "--gpu") for name in options.gpu]
    configs, cases = dict[str, Any](), dict[str, Cell]()
    for name, hardware, gpus, way in product(options.config, kinds, counts, WAYS):
        started_at = time.monotonic()
        batch = f"--train.global_batch_size={gpus * options.sequences_per_gpu}"
        keys = [f"--config={name}", "--parallel.plan=auto", batch, *overrides, *WAYS[way]]
        config = parse_config(keys, "tools.bench")
        configs[Path(name).stem] = config_to_record(config)
        case = {"config": Path(name).stem, "gpu": hardware.name, "gpus": gpus, "way": way}
        label = " ".join(map(str, case.values()))
        predicted = predict_best(config.job, gpus, hardware)
        cases[label] = {**case, "n_layers": len(source_of(config.model).units.checkpointed), **predicted}
        print(f"{label}: {time.monotonic() - started_at:.0f} s", file=sys.stderr, flush=True)
    cells = list(cases.values())
    if options.picture:
        write_atomically(options.picture, picture_bytes(draw_scaling(pairs(cells)), options.picture.suffix))
    return BenchResult(configs, {"predicted": True, "cases": cases}, scale_text(cells))


def predict_best(job: TrainingJob, gpus: int, hardware: Hardware) -> dict[str, Any]:
    """Return the figures that `tools.plan --sweep` prints for the best plan, its MFU and its activation
    checkpointing; or the reason why no plan fits."""
    try:
        row = sweep(job, [gpus], GPUS_PER_NODE, hardware)[gpus]
    except PlanError as error:  # its last line is GPUS: REASON
        return {"fits": False, "reason": str(error).splitlines()[-1].partition(": ")[2]}
    assert not isinstance(row, str), "a sweep without a plan is a PlanError"
    figures = row_json(gpus, row, tokens=None)
    choices = figures["choices"] | blocks_of(row.plan)
    return {**figures, "mfu": row.mfu, "choices": choices}


def blocks_of(plan: Plan) -> dict[str, Any]:
    """Return a plan's mode of activation checkpointing and its number of blocks."""
    modes = [mode for unit in plan.units if (mode := unit.activation_checkpoint) != "none"]
    return {
        "activation_checkpoint": modes[0] if modes else "none",
        "activation_checkpoint_blocks": len(modes),
    }


def pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Return pairs of the planner's choice and FSDP alone, for every model, kind and number of GPUs."""
    return list(zip(cells[::2], cells[1::2], strict=True))  # in the order of WAYS


def tables(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a Markdown table for each model, with a row for each number of GPUs on which a way fits."""
    fitting = [(chosen, fsdp) for chosen, fsdp in pairs(cells) if chosen["fits"] or fsdp["fits"]]
    for model, model_pairs in groupby(fitting, key=lambda pair: pair[0]["config"]):
        rows = [HEAD, ["---"] * len(HEAD), *(row_of(*pair) for pair in model_pairs)]
        yield "\n".join([f"**{model}**", "", *(f"| {' | '.join(row)} |" for row in rows)])


def row_of(chosen: Cell, fsdp: Cell) -> list[str]:
    """Return the row of one kind and number of GPUs."""
    degrees = [str(chosen["choices"][axis]) for axis in ("tp", "dp_replicate", "dp_shard") if chosen["fits"]]
    mesh = " x ".join(degrees) or "-"
    return [chosen["gpu"], f"{chosen['gpus']:,}", mesh, *_figures(chosen), *_figures(fsdp)]


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
    """Return the mode of activation checkpointing, with the number of blocks if it is not all of them."""
    mode: str = choices["activation_checkpoint"]
    default = choices.get("checkpointed_blocks", n_layers)  # the key's name in old records
    blocks = choices.get("activation_checkpoint_blocks", default)
    return mode if mode == "none" or blocks == n_layers else f"{mode}, {blocks} of {n_layers}"


def scale_text(cells: Sequence[Cell]) -> str:
    """Return all tables, and the reasons of cases without a plan."""
    reasons = [
        f"{c['config']}, {c['gpus']} {c['gpu']}, {c['way']}: {c['reason']}" for c in cells if not c["fits"]
    ]
    files = " and ".join(sorted({f"configs/hardware/{cell['gpu']}.yaml" for cell in cells}))
    last = f"predicted with {files}; nothing is measured"
    return "\n\n".join([*tables(cells), *(["\n".join(reasons)] if reasons else []), last])


MEASUREMENT = Measurement(
    "scale",
    add_scale_options,
    measure_scale,
    summary="predicted speed and memory on 8 to 4,096 GPUs",
    description=(
        "Plan configs for kinds and numbers of GPUs in two ways: with the degrees that the planner chooses, "
        "and with FSDP alone (dp_replicate and tp are 1; the planner chooses the rest). The global batch "
        "grows with the number of GPUs. Print the predictions: tokens per second per GPU, MFU, the share of "
        "a step that waits for communication, memory, degrees. Nothing is run or measured."
    ),
)
