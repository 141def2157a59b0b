"""How runs scale, as the planner predicts it: its own choice, and FSDP alone, on 8 to thousands of GPUs, as
tables on the screen and in a page of the docs. A record can be gone on with."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.search import SearchResult
from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.bench import harness
from meshwright.tools.bench.case_record import CaseRecord
from meshwright.tools.bench.harness import BenchResult, check_page, fill_page, markdown_table
from meshwright.tools.bench.planner.scaling_plot import draw_scaling
from meshwright.tools.bench.train_run import config_to_record
from meshwright.tools.cli import format_table, positive
from meshwright.tools.plan.report import Target, find_gpu, needed_words
from meshwright.tools.plan.scaling import read_sweep
from meshwright.tools.processes import BenchError
from meshwright.train.config import Config, TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.predict import predict, search_plans

SUMMARY = "predicted speed and memory on 8 to 4,096 GPUs"
DESCRIPTION = (
    "Plan configs for kinds and numbers of GPUs, twice: with the degrees that the planner chooses, and with "
    "FSDP alone (dp_replicate and tp 1; the rest is chosen). The global batch grows with the GPUs. Says what "
    "is predicted of each: tokens per second and GPU, both MFUs, the share of a step that waits for "
    "communication, memory, degrees. Nothing runs; all is prediction. With --record every finished case is "
    "in the file at once; the same command again goes on with those missing."
)
EPILOG = (
    "Config keys of train.main are accepted too, as --section.key=value, and win over those of the configs."
)
WAYS = {"planner": (), "fsdp": ("--parallel.dp_replicate=1", "--parallel.tp=1")}


@dataclass(frozen=True)
class ScalingCase:
    """What one prediction is of: a config by name, a kind and number of GPUs, and a key of WAYS."""

    config: str
    gpu: str
    gpus: int
    way: str

    @property
    def name(self) -> str:
        return f"{Path(self.config).stem} {self.gpu} {self.gpus} {self.way}"


def add_scale_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scale`."""
    parser.add_argument(
        "--config",
        nargs="+",
        default=["llama_8b", "llama_70b", "llama_405b"],
        metavar="NAME_OR_PATH",
        help="default llama_8b llama_70b llama_405b",
    )
    parser.add_argument(
        "--gpu",
        nargs="+",
        default=["h100-sxm", "h200"],
        metavar="KIND",
        help="files of configs/hardware (default h100-sxm h200)",
    )
    parser.add_argument(
        "--gpus", default="8..4096", metavar="A..B", help="doublings from A to B (default 8..4096)"
    )
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="default 8")
    parser.add_argument(
        "--sequences-per-gpu",
        type=positive,
        default=2,
        metavar="N",
        help="of the global batch, for each GPU (default 2, as in torchtitan's published runs)",
    )
    parser.add_argument(
        "--again", action="store_true", help="begin the record anew instead of going on with it"
    )
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE.md",
        help="write tables and plot into this page, between its marks; the plot beside it",
    )


def measure_scale(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """All cases. Raises ConfigError and BenchError for what cannot be begun."""
    if any(override.startswith("--parallel.plan=") for override in overrides):
        raise ConfigError(
            "--parallel.plan: scale lets the planner choose. Fix single keys, as --parallel.tp=8, instead"
        )
    cases, kept = list(make_cases(options)), open_record(options, overrides)
    configs = {case.config: make_config(case, options, overrides) for case in cases}
    if options.page:
        check_page(options.page, "scale")
    for case in cases:
        if case.name not in kept.cases:
            predict_case(case, kept, options, overrides)
    kept.document["config"] = {Path(name).stem: config_to_record(config) for name, config in configs.items()}
    kept.save()
    if kept.path is not None:
        print(f"recorded: tools/bench/records/{kept.path.name}", file=sys.stderr)
    figures = kept.document["figures"]
    if options.page:
        write_page(options.page, figures)
    return BenchResult(kept.document["config"], figures, scale_text(figures))


def make_cases(options: argparse.Namespace) -> Iterator[ScalingCase]:
    """Those asked for: kinds of GPUs are known, and all counts of one model come one after the other, which
    share its trace."""
    counts = read_sweep(f"gpus={options.gpus}")
    kinds = [find_gpu(name).name for name in options.gpu]
    for config in options.config:
        yield from (ScalingCase(config, kind, gpus, way) for kind in kinds for gpus in counts for way in WAYS)


def make_config(case: ScalingCase, options: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """The config with everything that is not fixed left to the planner. Raises ConfigError."""
    batch = f"--train.global_batch_size={case.gpus * options.sequences_per_gpu}"
    return parse_config(
        [f"--config={case.config}", "--parallel.plan=auto", batch, *overrides, *WAYS[case.way]], "tools.bench"
    )


def open_record(options: argparse.Namespace, overrides: Sequence[str]) -> CaseRecord:
    """The newest record of the name that was given, else a new one; without a name one that is not kept.
    Raises BenchError where the newest was made with other settings."""
    settings = {
        "gpus_per_node": options.gpus_per_node,
        "sequences_per_gpu": options.sequences_per_gpu,
        "keys": [*overrides],
    }
    document = harness.make_document(
        "scale", options.command, None, {"predicted": True, "settings": settings, "cases": {}}
    )
    if options.record is None:
        return CaseRecord(None, document)
    name = options.record or "scale"
    harness.check_name(name)
    found = sorted(harness.RECORDS.glob(f"????-??-??-{name}.json"))
    if not found or options.again:
        return CaseRecord(harness.RECORDS / f"{document['date']}-{name}.json", document)
    kept = CaseRecord(found[-1], json.loads(found[-1].read_text(encoding="utf-8")))
    before = kept.document["figures"]["settings"]
    if before != settings:
        raise BenchError(
            f"--record {name}: {found[-1].name} was made with {before}, this is {settings}. Name another "
            "record"
        )
    return kept


def predict_case(
    case: ScalingCase, kept: CaseRecord, options: argparse.Namespace, overrides: Sequence[str]
) -> None:
    """One case into the record: null where nothing fits, with the reason."""
    began_at = time.monotonic()
    config, hardware = make_config(case, options, overrides), find_gpu(case.gpu)
    place = Target(case.gpus, min(case.gpus, options.gpus_per_node), hardware)
    kept.cases[case.name] = {
        "config": Path(case.config).stem,
        "gpu": case.gpu,
        "gpus": case.gpus,
        "way": case.way,
        "seq_len": config.train.seq_len,
        "n_layers": config.model.n_layers,
        **predict_row(config.job, place, hardware),
    }
    kept.save()
    print(f"{case.name}: {time.monotonic() - began_at:.0f} s", file=sys.stderr, flush=True)


def predict_row(job: TrainingJob, place: Target, hardware: Hardware) -> dict[str, Any]:
    """What is predicted of the best plan, as plain data."""
    try:
        choice = search_plans(job, place.gpus, place.machines())
    except PlanError as error:
        return {"fits": False, "reason": str(error).splitlines()[0]}
    if not choice.ranked:
        return {"fits": False, "reason": _too_large(choice, hardware)}
    plan = choice.best.plan
    prediction = predict(job, plan, hardware, place.gpus_per_node)
    timeline = prediction.timeline
    return {
        "fits": True,
        "choices": {**choice.best.choices, "accumulation": plan.accumulation},
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "mfu": prediction.mfu,
        "mfu_causal": prediction.mfu_causal,
        "step_time_s": timeline.step_s,
        "exposed_share": timeline.exposed_share,
        "exposed_by_lane_s": dict(timeline.exposed_by_lane),
        "reserved_gib": prediction.reserved_bytes / GIB,
    }


def _too_large(choice: SearchResult, hardware: Hardware) -> str:
    nearest = choice.does_not_fit[0]
    return f"no plan fits: the smallest needs {needed_words(nearest)} of {hardware.memory_gib:.1f} GiB"


Cell = Mapping[str, Any]
SHOWN_WAYS = ("planner", "fsdp")
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
            (
                found.get(SHOWN_WAYS[0], nothing | {"gpus": count}),
                found.get(SHOWN_WAYS[1], nothing | {"gpus": count}),
            )
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
    of_old_records = choices.get("checkpointed_blocks", "auto")  # the key's former name
    mode = choices["activation_checkpoint"]
    blocks = choices.get("activation_checkpoint_blocks", of_old_records)
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
