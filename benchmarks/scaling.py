"""Predict how runs scale from 8 to thousands of GPUs, by the planner's choice and by FSDP alone: `tools.plan`
for every config, kind and number of GPUs."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.support.harness import BenchResult, Measurement, run_benchmark
from meshwright.tools.cli import format_table, positive
from meshwright.tools.plan.scaling import read_sweep

WAYS = {"planner": (), "fsdp": ("--parallel.dp_replicate=1", "--parallel.tp=1")}
HEAD = (
    "config",
    "kind",
    "GPUs",
    "way",
    "tp x replicate x shard",
    "recomputed",
    "tokens/s",
    "MFU",
    "exposed",
    "GiB",
)


def add_scaling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `scaling`."""
    add, models, kinds = parser.add_argument, ["llama_8b", "llama_70b", "llama_405b"], ["h100-sxm", "h200"]
    add("--config", nargs="+", default=models, metavar="NAME", help=f"default {' '.join(models)}")
    add("--gpu", nargs="+", default=kinds, metavar="KIND", help=f"default {' '.join(kinds)}")
    add("--gpus", default="8..4096", metavar="A..B", help="doublings from A to B (default 8..4096)")
    text = "sequences of the global batch per GPU (default 2, as in torchtitan's published runs)"
    add("--sequences-per-gpu", type=positive, default=2, metavar="N", help=text)


def measure_scaling(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Predict all cases."""
    rows = []
    for case in product(options.config, options.gpu, read_sweep(f"gpus={options.gpus}"), WAYS):
        batch = f"--train.global_batch_size={case[2] * options.sequences_per_gpu}"
        rows.append(dict(zip(HEAD, case, strict=False)) | predict_case(*case, batch, *overrides))
        print(" ".join(map(str, case)), file=sys.stderr, flush=True)
    table = format_table(HEAD, [[str(row.get(column, "-")) for column in HEAD] for row in rows])
    reasons = [
        f"{row['config']}, {row['GPUs']} {row['kind']}: {row['reason']}" for row in rows if "reason" in row
    ]
    return BenchResult(
        None, {"rows": rows}, "\n".join([table, "", *reasons, "predicted; nothing is measured"])
    )


def predict_case(config: str, kind: str, gpus: int, way: str, *keys: str) -> dict[str, Any]:
    """Return the chosen plan and its figures, or the reason why no plan fits."""
    options = ["--config", config, "--gpu", kind, "--gpus", str(gpus), "--json", "--parallel.plan=auto"]
    command = [sys.executable, "-m", "meshwright.tools.plan", *options, *WAYS[way], *keys]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"reason": done.stderr.strip().splitlines()[-1]}
    best, predicted = (document := json.loads(done.stdout))["candidates"][0]["choices"], document["predicted"]
    return {
        "tp x replicate x shard": " x ".join(str(best[axis]) for axis in ("tp", "dp_replicate", "dp_shard")),
        "recomputed": f"{best['activation_checkpoint']}, {best['activation_checkpoint_blocks']}",
        "tokens/s": round(predicted["tokens_per_s_per_gpu"]),
        "MFU": round(predicted["mfu"], 3),
        "exposed": round(predicted["exposed_share"], 3),
        "GiB": round(predicted["reserved_gib"], 1),
    }


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
