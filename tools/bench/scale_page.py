"""Figures of `bench scale` as tables for people, on the screen and in a page of the docs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from meshwright.parallel.planner.plot.shapes import to_svg
from meshwright.tools.bench.page import fill_page, markdown_table
from meshwright.tools.bench.scale_plot import draw_scaling
from meshwright.tools.command import format_table

Cell = Mapping[str, Any]
WAYS = ("planner", "fsdp")
SHOWN = (8, 1024, 4096)  # numbers of GPUs in the page; the record has all
KEPT_AT = 1024  # GPUs at which the share of the roof that is kept is stated
HEAD = (
    "GPUs",
    "planner: tp x replicate x shard",
    "recomputed",
    "tokens/s",
    "MFU",
    "exposed",
    "GiB",
    "FSDP: recomputed",
    "tokens/s",
    "MFU",
    "exposed",
    "GiB",
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
NONE = "-"


def pairs(cells: Sequence[Cell]) -> Iterator[tuple[str, str, list[tuple[Cell, Cell]]]]:
    """Model, kind of GPU, and for each number of GPUs the planner's choice and FSDP alone; numbers on which
    neither fits are left out. A case that is missing, as in a record that is not finished, counts as one that
    does not fit."""
    ordered = sorted(cells, key=lambda cell: (_size(cell), cell["gpu"], cell["gpus"]))
    for (model, gpu), group in groupby(ordered, key=lambda cell: (cell["config"], cell["gpu"])):
        by_count = {
            count: {cell["way"]: cell for cell in same}
            for count, same in groupby(group, key=lambda cell: cell["gpus"])
        }
        nothing = {"fits": False, "reason": "not predicted"}
        both = [
            (found.get(WAYS[0], nothing | {"gpus": count}), found.get(WAYS[1], nothing | {"gpus": count}))
            for count, found in by_count.items()
        ]
        yield model, gpu, [pair for pair in both if any(cell["fits"] for cell in pair)]


def _size(cell: Cell) -> tuple[int, str]:
    """Models by their size where their names end with it, as llama_70b."""
    name: str = cell["config"]
    digits = name.rpartition("_")[2].removesuffix("b")
    return int(digits) if digits.isdecimal() else 0, name


def row_of(chosen: Cell, alone: Cell) -> list[str]:
    """One number of GPUs."""
    mesh = (
        " x ".join(str(chosen["choices"][axis]) for axis in ("tp", "dp_replicate", "dp_shard"))
        if chosen["fits"]
        else NONE
    )
    return [f"{chosen['gpus']:,}", mesh, *_figures(chosen), *_figures(alone)]


def _figures(cell: Cell) -> list[str]:
    if not cell["fits"]:
        return ["does not fit", NONE, NONE, NONE, NONE]
    return [
        recomputed(cell["choices"], cell["n_layers"]),
        f"{cell['tokens_per_s_per_gpu']:,.0f}",
        f"{cell['mfu']:.1%}",
        f"{cell['exposed_share']:.1%}",
        f"{cell['reserved_gib']:.1f}",
    ]


def recomputed(choices: Mapping[str, Any], n_layers: int) -> str:
    """What is checkpointed, and how many blocks, where it is not all of them."""
    mode, blocks = choices["activation_checkpoint"], choices.get("checkpointed_blocks", "auto")
    return f"{mode}" if mode == "none" or blocks in ("auto", n_layers) else f"{mode}, {blocks} of {n_layers}"


def kept_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """Of each model and kind: the planner's MFU on the fewest GPUs that it fits on, the best one up to
    KEPT_AT GPUs, and what of both is left at KEPT_AT, by the planner's choice and of the best by FSDP
    alone."""
    rows = []
    for model, gpu, both in pairs(cells):
        chosen = [pair[0] for pair in both if pair[0]["fits"] and pair[0]["gpus"] <= KEPT_AT]
        alone = next((pair[1] for pair in both if pair[1]["fits"] and pair[1]["gpus"] == KEPT_AT), None)
        if chosen and chosen[-1]["gpus"] == KEPT_AT:
            fewest, best, here = (
                chosen[0],
                max(chosen, key=lambda cell: float(cell["mfu"])),
                chosen[-1]["mfu"],
            )
            rows.append(
                [
                    model,
                    gpu,
                    *(f"{cell['gpus']:,}: {cell['mfu']:.1%}" for cell in (fewest, best)),
                    f"{here:.1%}",
                    f"{here / fewest['mfu']:.1%}",
                    f"{here / best['mfu']:.1%}",
                    *(
                        (f"{alone['mfu']:.1%}", f"{alone['mfu'] / best['mfu']:.1%}")
                        if alone
                        else (NONE, NONE)
                    ),
                ]
            )
    return rows


def scale_text(figures: Mapping[str, Any]) -> str:
    """All that was predicted, for the screen."""
    cells = list(figures["cases"].values())
    parts = []
    for model, gpu, both in pairs(cells):
        parts.append(f"{model} on {gpu}\n" + format_table(HEAD, [row_of(*pair) for pair in both]))
        parts[-1] += "".join(
            f"\n{cell['gpus']:,} GPUs, {cell['way']}: {cell['reason']}"
            for cell in cells
            if (cell["config"], cell["gpu"]) == (model, gpu) and not cell["fits"]
        )
    kept = kept_rows(cells)
    parts += [format_table(KEPT_HEAD, kept)] if kept else []
    files = " and ".join(sorted({f"configs/hardware/{cell['gpu']}.yaml" for cell in cells}))
    return "\n\n".join([*parts, f"predicted with {files}; nothing of it is measured"])


def page_part(figures: Mapping[str, Any], plot: str) -> str:
    """The tables as Markdown, with the plot: of each model and kind the fewest GPUs, and SHOWN."""
    cells = list(figures["cases"].values())
    parts = [
        f"![Predicted MFU and exposed share, by number of GPUs]({plot})",
        markdown_table(KEPT_HEAD, kept_rows(cells)),
    ]
    for model, same in groupby(pairs(cells), key=lambda group: group[0]):
        shown = (
            (gpu, pair)
            for _, gpu, both in same
            for i, pair in enumerate(both)
            if i == 0 or pair[0]["gpus"] in SHOWN
        )
        parts.append(
            f"**{model}**\n\n"
            + markdown_table(("kind", *HEAD), [[gpu, *row_of(*pair)] for gpu, pair in shown])
        )
    return "\n\n".join(parts)


def write_page(page: Path, figures: Mapping[str, Any]) -> None:
    """Tables into the page, and the plot beside it."""
    plot = page.with_suffix(".svg")
    fill_page(page, "scale", page_part(figures, plot.name))
    plot.write_text(to_svg(draw_scaling(list(pairs(list(figures["cases"].values()))))), encoding="utf-8")
