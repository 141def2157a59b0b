"""How a run scales, as the planner predicts it: its own choice, and FSDP alone, on 8 to thousands of GPUs."""

import argparse
from collections.abc import Sequence
from typing import Any

from tools.bench.measurement import Result
from tools.bench.run import config_to_record
from tools.command import format_table, positive
from tools.plan.answer import find_gpu
from tools.plan.sweep import Sweep, read_sweep, sweep, sweep_json
from train.config import Config, ConfigError, parse_config

SUMMARY = "predicted speed and memory on 8 to 4,096 GPUs"
DESCRIPTION = (
    "Plan a config for every number of GPUs, twice: with the degrees that the planner chooses, and with FSDP alone "
    "(dp_replicate and tp 1; the rest is chosen). Prints what it predicts of each: tokens per second and GPU, both MFUs, the "
    "share of a step that waits for communication, memory, degrees. Nothing runs; all of it is prediction."
)
EPILOG = "Config keys of train.main are accepted too, as --section.key=value, and win over those of the config."
WAYS = {"planner": (), "fsdp": ("--parallel.dp_replicate=1", "--parallel.tp=1")}


def add_scale_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scale`."""
    parser.add_argument("--config", default="llama_8b", metavar="NAME_OR_PATH", help="default llama_8b")
    parser.add_argument("--gpu", default="h100-sxm", metavar="KIND", help="a file of configs/hardware (default h100-sxm)")
    parser.add_argument("--gpus", default="8..4096", metavar="A..B", help="doublings from A to B (default 8..4096)")
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="default 8")


def measure_scale(options: argparse.Namespace, overrides: Sequence[str]) -> Result:
    """Both ways at every number of GPUs. Raises ConfigError, and PlanError where a way is possible on none."""
    hardware, counts = find_gpu(options.gpu), read_sweep(f"gpus={options.gpus}")
    configs = {way: make_config(options.config, keys, overrides) for way, keys in WAYS.items()}
    swept = {way: sweep(config, counts, options.gpus_per_node, hardware) for way, config in configs.items()}
    figures = {"predicted": True, "hardware_file": hardware.name, "gpus_per_node": options.gpus_per_node,
               **{way: rows(one) for way, one in swept.items()}}  # fmt: skip
    return Result({way: config_to_record(config) for way, config in configs.items()}, figures, scale_text(figures))


def make_config(name: str, keys: Sequence[str], overrides: Sequence[str]) -> Config:
    """The config with everything that is not fixed left to the planner. Raises ConfigError."""
    if any(override.startswith("--parallel.plan=") for override in overrides):
        raise ConfigError("--parallel.plan: scale lets the planner choose. Fix single keys, as --parallel.tp=8, instead")
    return parse_config([f"--config={name}", "--parallel.plan=auto", *overrides, *keys], "tools.bench")


def rows(swept: Sweep) -> list[dict[str, Any]]:
    """A row for each number of GPUs, as plain data; null where nothing fits, with the reason."""
    plain = sweep_json(swept, None)["sweep"]
    mfus = [{"mfu": row.prediction and row.prediction.mfu, "mfu_causal": row.prediction and row.prediction.mfu_causal}
            for row in swept.rows]  # fmt: skip
    return [{**row, **mfu} for row, mfu in zip(plain, mfus, strict=True)]


def scale_text(figures: dict[str, Any]) -> str:
    """The table for people."""
    head = ("GPUs", "by", "tp", "replicate", "shard", "checkpointing", "micro", "tokens/s per GPU", "MFU full", "causal",
            "exposed", "GiB")  # fmt: skip
    cells = [_cells(way, row) for pair in zip(*(figures[way] for way in WAYS), strict=True)
             for way, row in zip(WAYS, pair, strict=True) if row["fits"]]  # fmt: skip
    missing = [f"{row['gpus']} GPUs, {way}: {row['reason']}" for way in WAYS for row in figures[way] if not row["fits"]]
    last = f"predicted with configs/hardware/{figures['hardware_file']}.yaml; nothing of it is measured"
    return "\n\n".join([format_table(head, cells), *(["\n".join(missing)] if missing else []), last])


def _cells(way: str, row: dict[str, Any]) -> list[str]:
    chosen = row["choices"]
    names = ("tp", "dp_replicate", "dp_shard", "activation_checkpoint", "micro_batch_size")
    mfus = [f"{row[key]:.1%}" if row[key] is not None else "-" for key in ("mfu", "mfu_causal")]
    return [f"{row['gpus']:,}", way, *(str(chosen[name]) for name in names), f"{row['tokens_per_s_per_gpu']:,.0f}", *mfus,
            f"{row['exposed_share']:.1%}", f"{row['reserved_gib']:.1f}"]  # fmt: skip
