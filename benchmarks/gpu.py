"""train.main at Llama 8B's shape on one GPU and on two, changing one setting at a time, with the
planner's prediction for each run."""

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu import shape_variables
from benchmarks.predictions import predict_run
from benchmarks.support import harness
from benchmarks.support.harness import BenchResult, Measurement, config_keys, run_benchmark
from benchmarks.support.peers import PEER_HELP, Contender, parse_peers
from benchmarks.train import MFUS, ONLY_TRAINING, WARM_UP_STEPS, Setup, config_to_record, measure_run, resolve
from meshwright.parallel.planner.hardware import Hardware, find_hardware, load_hardware
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError
from meshwright.train.errors import USER_ERRORS
from meshwright.train.files import write_atomically

# Llama 3 8B (arXiv 2407.21783, table 3). COMMON sets 8 of its 32 layers, and weights and moments in bfloat16
# so that all 32 layers fit one GPU. The keys of a case override both.
SHAPE_8B = (
    "model.dim=4096 model.n_heads=32 model.n_kv_heads=8 model.ffn_dim=14336 model.vocab_size=128256 "
    "model.max_seq_len=8192 train.seq_len=8192 parallel.float8.min_dim=1024"
)
# a test of the program itself; overrides the keys of a case
TINY = (
    "model.dim=32 model.n_heads=4 model.n_kv_heads=2 model.ffn_dim=64 model.vocab_size=264 "
    "model.max_seq_len=64 train.seq_len=64 parallel.float8.min_dim=16"
)
# A report waits for the GPU, whose next work then begins after the host's: eight steps share that. The first
# report is warm-up.
STEPS, STEPS_PER_REPORT = 24, 8
COMMON = (
    f"{ONLY_TRAINING} metrics.tensorboard=false parallel.plan=manual "
    "model.n_layers=8 train.micro_batch_size=1 parallel.param_dtype=bfloat16 parallel.storage_dtype=bfloat16 "
    f"optim.state_dtype=bfloat16 parallel.activation_checkpoint=none train.steps={STEPS}"
)
# Config keys of train.main by name of the case, without dashes, in addition to those of the shape; the most
# important cases first.
ONE_GPU = {
    "8 layers": "",
    "32 layers": "model.n_layers=32",
    "32 layers, float8 tensorwise": "model.n_layers=32 parallel.float8.recipe=tensorwise",
    "32 layers, recomputed": "model.n_layers=32 parallel.activation_checkpoint=full",
    "32 layers, selective": "model.n_layers=32 parallel.activation_checkpoint=selective",
    "eager": "parallel.compile.enabled=false",
    "float32 weights and moments": "parallel.storage_dtype=float32 optim.state_dtype=float32",
    "float32 weights": "parallel.storage_dtype=float32",
    "float8 tensorwise": "parallel.float8.recipe=tensorwise",
    "float8 rowwise": "parallel.float8.recipe=rowwise",
    "joined projections": "parallel.fused_projections=true",
    "4 layers": "model.n_layers=4",
    "16 layers": "model.n_layers=16",
    "2 sequences": "train.micro_batch_size=2",
    "4 micro batches": "train.global_batch_size=4",
    "recomputed": "parallel.activation_checkpoint=full",
    "half recomputed": "parallel.activation_checkpoint=full parallel.activation_checkpoint_blocks=4",
    "budget 0.5": "parallel.activation_checkpoint=budget parallel.activation_budget=0.5",
    "activations in host memory": "parallel.activation_checkpoint=offload",
    "attention cudnn": "parallel.attention=cudnn",
    "attention flash": "parallel.attention=flash",
    "attention flex": "parallel.attention=flex",
    "loss in chunks of 1024": "parallel.loss_chunk_tokens=1024",
    "loss in chunks of 2048": "parallel.loss_chunk_tokens=2048",
    "loss in chunks of 4096": "parallel.loss_chunk_tokens=4096",
    "loss in one": "parallel.loss_chunk_tokens=0",
}
TWO_GPUS = {
    "fsdp": "",
    "fsdp, prefetch 0": "parallel.forward_prefetch=0 parallel.backward_prefetch=0",
    "fsdp, prefetch 2": "parallel.forward_prefetch=2 parallel.backward_prefetch=2",
    "fsdp, kept gathered": "parallel.reshard_after_forward=false",
    "ddp": "parallel.strategy=ddp",
    "tp": "parallel.tp=2",
    "tp, async": "parallel.tp=2 parallel.async_tp=true",
}
CASES = ONE_GPU | TWO_GPUS
MEAN_ERROR, WORST_ERROR = 0.05, 0.10  # targets for the error of the predicted step time
MOST_THREADS = 8  # CPU threads of a process: feeding a GPU needs no more
HEAD = ("case", "tokens/s per GPU", "spread", "MFU full", "causal", "step s", "predicted", "GiB", "predicted")
# must be the same for all cases of a record
SAME = (("hardware", "gpu"), ("hardware", "cpu"), ("versions", "torch"), ("figures", "shape"))


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpu`."""
    add = parser.add_argument
    text = "start no case after N minutes (default 9)"
    add("--minutes", type=positive, default=9, metavar="N", help=text)
    text = "run only these cases (default all)"
    add("--only", nargs="+", default=[*CASES], choices=CASES, metavar="NAME", help=text)
    text = f"{PEER_HELP}; it receives the first case's shape and prints BENCH lines, as in `cpu`"
    add("--peer", action="append", default=[], metavar="NAME=COMMAND", help=text)
    text = "a tiny model, also on a CPU, to test the command; the record has shape tiny"
    add("--tiny", action="store_true", help=text)


def measure_gpu(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Run the cases in turn, as many as time allows. Raises BenchError and ConfigError before the first."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not options.tiny:
        raise BenchError("gpu: Llama 8B's shape needs a GPU, but this machine has none: use --tiny")
    threads = min(MOST_THREADS, os.cpu_count() or 1) if gpus else 1
    names = [name for name in CASES if name in options.only]
    setups = {name: make_setup(name, options.tiny, threads, overrides) for name in names}
    variables = shape_variables(resolve(setups[names[0]]), 1)
    hardware = find_hardware(torch.cuda.get_device_name(0)) if gpus else load_hardware()["cpu"]
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(run_ours, setup, hardware)
        for name, setup in setups.items()
        if setup.processes <= (gpus or 2)
    }
    for peer in parse_peers(options.peer, threads, variables):
        runs[f"peer {peer.name}"] = partial(run_peer, peer)
    path, document = open_record(options)
    run_cases(runs, 60 * options.minutes, path, document)
    return BenchResult(None, document["figures"], gpu_text(document["figures"], [*setups, *runs]))


def make_setup(name: str, tiny: bool, threads: int, overrides: Sequence[str]) -> Setup:
    """Return the run of train.main for a case; `overrides` are the user's keys and win."""
    keys = config_keys(f"{COMMON} {SHAPE_8B} {CASES[name]} {TINY if tiny else ''}")
    return Setup(2 if name in TWO_GPUS else 1, threads, [*keys, *overrides], STEPS_PER_REPORT)


def run_ours(setup: Setup, hardware: Hardware | None) -> dict[str, Any]:
    """Return config, figures and the planner's prediction of a run. The prediction is None if no file in
    configs/hardware describes the GPU. Raises BenchError if the run fails."""
    config = resolve(setup)
    predicted = hardware and predict_run(config.job, setup.processes, setup.threads, hardware)
    return {
        "config": config_to_record(config),
        "predicted": predicted and dataclasses.asdict(predicted),
        "run": dataclasses.asdict(measure_run(setup, {})),
    }


def run_peer(peer: Contender) -> dict[str, Any]:
    """Return the figures of a peer, without config and prediction. Raises BenchError if it fails."""
    return {"run": peer.run({})}


def open_record(options: argparse.Namespace) -> tuple[Path | None, dict[str, Any]]:
    """Return path and content of the newest record with the given name, else of a new one. The path is None
    without --record.

    Raises BenchError if the newest record has another machine, torch or shape.
    """
    figures: dict[str, Any] = {"shape": "tiny" if options.tiny else "8b", "cases": {}}
    document = harness.make_document("benchmarks.gpu", options.command, None, figures)
    if options.record is None:
        return None, document
    name = options.record or "gpu"
    paths = sorted(harness.RECORDS.glob(f"????-??-??-{name}.json"))
    if not paths:
        return harness.RECORDS / f"{document['date']}-{name}.json", document
    record: dict[str, Any] = json.loads(paths[-1].read_text(encoding="utf-8"))
    for section, key in SAME:
        before, now = record[section].get(key), document[section].get(key)
        if before != now:
            raise BenchError(
                f"--record {name}: {paths[-1].name} has {key} {before}, but this run has {key} {now}: use "
                "another name"
            )
    return paths[-1], record


def run_cases(
    runs: Mapping[str, Callable[[], dict[str, Any]]],
    budget_s: float,
    path: Path | None,
    document: dict[str, Any],
) -> None:
    """Run the cases that the record lacks. After a failed one the others run; the next call repeats it."""
    cases, stop_at = document["figures"]["cases"], time.monotonic() + budget_s
    for name, run in runs.items():
        if "run" in cases.get(name, {}):
            continue
        if time.monotonic() > stop_at:
            print(
                "--minutes: time limit reached; run the same command again for the remaining cases",
                file=sys.stderr,
                flush=True,
            )
            break
        print(f"{name} ...", file=sys.stderr, flush=True)
        started_at, outcome = time.monotonic(), "done"
        try:
            result = run()
        except USER_ERRORS as error:
            result = {"reason": f"{type(error).__name__}: {error}"}
            outcome = result["reason"].splitlines()[0]
        versions = harness.find_versions()
        cases[name] = {"date": datetime.date.today().isoformat(), "commit": versions["commit"], **result}
        print(f"  {outcome}, {time.monotonic() - started_at:.0f} s", file=sys.stderr, flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{json.dumps(harness.without_names(document), indent=2)}\n".encode())
    if path is not None:
        print(f"recorded: benchmarks/records/{path.name}", file=sys.stderr)


def gpu_text(figures: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a table of the measured cases, the planner's errors, and the reasons of missing cases."""
    cases = {name: figures["cases"].get(name, {}) for name in names}
    measured = {name: case for name, case in cases.items() if "run" in case}
    parts = [f"shape: {figures['shape']}"]
    if measured:
        parts.append(format_table(HEAD, [_cells(name, case) for name, case in measured.items()]))
    errors = [
        abs(case["predicted"]["step_s"] / step_s - 1)
        for case in measured.values()
        if case.get("predicted") and (step_s := _step_s(case))
    ]
    if errors:
        parts.append(
            f"predicted step time: mean error {statistics.mean(errors):.1%} (target: {MEAN_ERROR:.0%}), "
            f"worst {max(errors):.1%} (target: {WORST_ERROR:.0%})"
        )
    missing = [
        f"failed: {name}: {case['reason'].splitlines()[-1].strip()}"
        if case
        else f"not measured: {name}{' (2 GPUs)' if name in TWO_GPUS else ''}"
        for name, case in cases.items()
        if "run" not in case
    ]
    return "\n\n".join([*parts, *(["\n".join(missing)] if missing else [])])


def _cells(name: str, case: Mapping[str, Any]) -> list[str]:
    run, predicted = case["run"], case.get("predicted") or {}
    values = (
        (run["tokens_per_s_per_rank"], ",.0f"),
        (run.get("spread"), ".1%"),
        *((run.get(key), ".1%") for key in MFUS),
        (_step_s(case), ".3f"),
        (predicted.get("step_s"), ".3f"),
        (run["peak_memory_gib"], ".1f"),
        (predicted.get("peak_gib"), ".1f"),
    )
    return [name, *("-" if value is None else format(value, form) for value, form in values)]


def _step_s(case: Mapping[str, Any]) -> Any:
    """Return the median step time of the reports whose median rate is the case's; None for a peer, which does
    not report it."""
    if "config" not in case:
        return None
    warm_up = max(1, WARM_UP_STEPS // case["config"]["metrics"]["every"])
    return statistics.median(case["run"]["step_times_s"][warm_up:])


MEASUREMENT = Measurement(
    "gpu",
    add_gpu_options,
    measure_gpu,
    description=(
        "Run train.main at Llama 8B's shape with 8 layers and one sequence of 8,192 tokens per GPU, change "
        "one setting at a time, and print tokens per second, both MFUs and memory next to the planner's "
        "predictions. With --record every finished case is written immediately; the same command again "
        "continues with the missing cases."
    ),
    epilog=f"Cases: {'; '.join(CASES)}.",
    keeps_record=True,
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
