"""How runs scale, as the planner predicts it: its own choice, and FSDP alone, on 8 to thousands of GPUs; can
be gone on with."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.search import Choice, search
from meshwright.tools.bench import record
from meshwright.tools.bench.gpu_record import GpuRecord
from meshwright.tools.bench.measurement import Result
from meshwright.tools.bench.page import check_page
from meshwright.tools.bench.processes import BenchError
from meshwright.tools.bench.run import config_to_record
from meshwright.tools.bench.scale_page import scale_text, write_page
from meshwright.tools.command import positive
from meshwright.tools.plan.answer import Place, find_gpu, needed_words
from meshwright.tools.plan.sweep import read_sweep
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.predict import predict, trace_run
from meshwright.train.planning.resolve import make_job, model_units

SUMMARY = "predicted speed and memory on 8 to 4,096 GPUs"
DESCRIPTION = (
    "Plan configs for kinds and numbers of GPUs, twice: with the degrees that the planner chooses, and with "
    "FSDP alone "
    "(dp_replicate and tp 1; the rest is chosen). The global batch grows with the GPUs. Says what is "
    "predicted of each: tokens "
    "per second and GPU, both MFUs, the share of a step that waits for communication, memory, degrees. "
    "Nothing runs; all is "
    "prediction. With --record every finished case is in the file at once; the same command again goes on "
    "with those missing."
)
EPILOG = (
    "Config keys of train.main are accepted too, as --section.key=value, and win over those of the configs."
)
WAYS = {"planner": (), "fsdp": ("--parallel.dp_replicate=1", "--parallel.tp=1")}


@dataclass(frozen=True)
class Case:
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


def measure_scale(options: argparse.Namespace, overrides: Sequence[str]) -> Result:
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
    return Result(kept.document["config"], figures, scale_text(figures))


def make_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Those asked for: kinds of GPUs are known, and all counts of one model come one after the other, which
    share its trace."""
    counts = read_sweep(f"gpus={options.gpus}")
    kinds = [find_gpu(name).name for name in options.gpu]
    for config in options.config:
        yield from (Case(config, kind, gpus, way) for kind in kinds for gpus in counts for way in WAYS)


def make_config(case: Case, options: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """The config with everything that is not fixed left to the planner. Raises ConfigError."""
    batch = f"--train.global_batch_size={case.gpus * options.sequences_per_gpu}"
    return parse_config(
        [f"--config={case.config}", "--parallel.plan=auto", batch, *overrides, *WAYS[case.way]], "tools.bench"
    )


def open_record(options: argparse.Namespace, overrides: Sequence[str]) -> GpuRecord:
    """The newest record of the name that was given, else a new one; without a name one that is not kept.
    Raises BenchError where the newest was made with other settings."""
    settings = {
        "gpus_per_node": options.gpus_per_node,
        "sequences_per_gpu": options.sequences_per_gpu,
        "keys": [*overrides],
    }
    document = record.make_document(
        "scale", options.command, None, {"predicted": True, "settings": settings, "cases": {}}
    )
    if options.record is None:
        return GpuRecord(None, document)
    name = options.record or "scale"
    record.check_name(name)
    found = sorted(record.RECORDS.glob(f"????-??-??-{name}.json"))
    if not found or options.again:
        return GpuRecord(record.RECORDS / f"{document['date']}-{name}.json", document)
    kept = GpuRecord(found[-1], json.loads(found[-1].read_text(encoding="utf-8")))
    before = kept.document["figures"]["settings"]
    if before != settings:
        raise BenchError(
            f"--record {name}: {found[-1].name} was made with {before}, this is {settings}. Name another "
            f"record"
        )
    return kept


def predict_case(case: Case, kept: GpuRecord, options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """One case into the record: null where nothing fits, with the reason."""
    began_at = time.monotonic()
    config, hardware = make_config(case, options, overrides), find_gpu(case.gpu)
    place = Place(case.gpus, min(case.gpus, options.gpus_per_node), hardware)
    kept.cases[case.name] = {
        "config": Path(case.config).stem,
        "gpu": case.gpu,
        "gpus": case.gpus,
        "way": case.way,
        "seq_len": config.train.seq_len,
        "n_layers": config.model.n_layers,
        **predict_row(config, place, hardware),
    }
    kept.save()
    print(f"{case.name}: {time.monotonic() - began_at:.0f} s", file=sys.stderr, flush=True)


def predict_row(config: Config, place: Place, hardware: Hardware) -> dict[str, Any]:
    """What is predicted of the best plan, as plain data."""
    job = make_job(config, place.gpus, place.gpus_per_node, *place.best(config))
    try:
        choice = search(
            config.parallel,
            model_units(config.model),
            job,
            place.machines(),
            lambda plan: trace_run(config, plan),
        )
    except PlanError as error:
        return {"fits": False, "reason": str(error).splitlines()[0]}
    if not choice.fitting:
        return {"fits": False, "reason": _too_large(choice, hardware)}
    plan = choice.best.plan
    prediction = predict(config, plan, hardware, place.gpus_per_node)
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


def _too_large(choice: Choice, hardware: Hardware) -> str:
    nearest = choice.too_large[0]
    return f"no plan fits: the smallest needs {needed_words(nearest)} of {hardware.memory_gib:.1f} GiB"
