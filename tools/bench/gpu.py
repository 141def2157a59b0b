"""`bench gpu`: train.main at Llama 8B's shape on one GPU, and on two, by one key after another, with what the
planner predicts of each run beside it."""

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.planner.hardware import Hardware, find_hardware, load_hardware
from meshwright.tools.bench import harness
from meshwright.tools.bench.harness import BenchResult, Measurement
from meshwright.tools.bench.planner.predictions import predict_run
from meshwright.tools.bench.speed.cpu import shape_variables, tell
from meshwright.tools.bench.speed.peers import PEER_HELP, Contender, parse_peers
from meshwright.tools.bench.train_run import MFUS, Setup, config_to_record, measure_run, resolve, spread
from meshwright.tools.cli import format_table, positive
from meshwright.tools.processes import BenchError
from meshwright.train.errors import USER_ERRORS

# Llama 3 8B (arXiv 2407.21783, table 3) with 8 of its 32 layers: what every case has unless its keys say
# otherwise. Weights and moments in bfloat16, so that all 32 layers fit one GPU.
SHAPE_8B = (
    "model.dim=4096 model.n_heads=32 model.n_kv_heads=8 model.ffn_dim=14336 model.vocab_size=128256 "
    "model.max_seq_len=8192 train.seq_len=8192 parallel.float8.min_dim=1024"
)
# to see that everything works; wins over the keys of a case
TINY = (
    "model.dim=32 model.n_heads=4 model.n_kv_heads=2 model.ffn_dim=64 model.vocab_size=264 "
    "model.max_seq_len=64 train.seq_len=64 parallel.float8.min_dim=16"
)
STEPS, STEPS_PER_REPORT = 10, 2  # 4 steps warm up; a report waits for the GPU
COMMON = (
    "data.source=stdlib checkpoint.every=0 train.eval_every=0 metrics.tensorboard=false parallel.plan=manual "
    "model.n_layers=8 train.micro_batch_size=1 parallel.param_dtype=bfloat16 parallel.storage_dtype=bfloat16 "
    f"optim.state_dtype=bfloat16 parallel.activation_checkpoint=none train.steps={STEPS}"
)


@dataclass(frozen=True)
class GpuCase:
    """One run: config keys of train.main without their dashes, beside those of the shape; and its GPUs."""

    name: str
    keys: str = ""
    gpus: int = 1


# The most important first.
CASES = (
    GpuCase("8 layers"),
    GpuCase("32 layers", "model.n_layers=32"),
    GpuCase("32 layers, float8 tensorwise", "model.n_layers=32 parallel.float8.recipe=tensorwise"),
    GpuCase("32 layers, recomputed", "model.n_layers=32 parallel.activation_checkpoint=full"),
    GpuCase("32 layers, selective", "model.n_layers=32 parallel.activation_checkpoint=selective"),
    GpuCase("eager", "parallel.compile.enabled=false"),
    GpuCase("float32 weights and moments", "parallel.storage_dtype=float32 optim.state_dtype=float32"),
    GpuCase("float32 weights", "parallel.storage_dtype=float32"),
    GpuCase("float8 tensorwise", "parallel.float8.recipe=tensorwise"),
    GpuCase("float8 rowwise", "parallel.float8.recipe=rowwise"),
    GpuCase("joined projections", "parallel.fused_projections=true"),
    GpuCase("4 layers", "model.n_layers=4"),
    GpuCase("16 layers", "model.n_layers=16"),
    GpuCase("2 sequences", "train.micro_batch_size=2"),
    GpuCase("4 micro batches", "train.global_batch_size=4"),
    GpuCase("recomputed", "parallel.activation_checkpoint=full"),
    GpuCase("half recomputed", "parallel.activation_checkpoint=full parallel.activation_checkpoint_blocks=4"),
    GpuCase("budget 0.5", "parallel.activation_checkpoint=budget parallel.activation_budget=0.5"),
    GpuCase("activations in host memory", "parallel.activation_checkpoint=offload"),
    *(
        GpuCase(f"attention {kernel}", f"parallel.attention={kernel}")
        for kernel in ("cudnn", "flash", "flex")
    ),
    *(
        GpuCase(f"loss in chunks of {tokens}", f"parallel.loss_chunk_tokens={tokens}")
        for tokens in (1024, 2048, 4096)
    ),
    GpuCase("loss in one", "parallel.loss_chunk_tokens=0"),
    GpuCase("fsdp", gpus=2),
    *(
        GpuCase(
            f"fsdp, prefetch {units}",
            f"parallel.forward_prefetch={units} parallel.backward_prefetch={units}",
            gpus=2,
        )
        for units in (0, 2)
    ),
    GpuCase("fsdp, kept gathered", "parallel.reshard_after_forward=false", gpus=2),
    GpuCase("ddp", "parallel.strategy=ddp", gpus=2),
    GpuCase("tp", "parallel.tp=2", gpus=2),
    GpuCase("tp, async", "parallel.tp=2 parallel.async_tp=true", gpus=2),
)
MEAN_ERROR, WORST_ERROR = 0.05, 0.10  # what the project asks for of the predicted step time
MOST_THREADS = 8  # of the CPU: what feeds a GPU needs no more
# in one record
SAME = (("hardware", "gpu"), ("hardware", "cpu"), ("versions", "torch"), ("figures", "shape"))


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    """Options of `gpu`."""
    parser.add_argument(
        "--minutes", type=positive, default=9, metavar="N", help="start no case after this long (default 9)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="cases of these names (default all)"
    )
    parser.add_argument("--rounds", type=positive, default=1, metavar="N", help="runs of each (default 1)")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help=f"{PEER_HELP}; it is told the first case's shape as in `cpu`, and prints the same lines",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a tiny model, on a CPU too, to see that everything works; the record says so",
    )


def measure_gpu(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """All cases that time allows, in turn. Raises BenchError and ConfigError for what cannot be begun."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not options.tiny:
        raise BenchError("gpu: Llama 8B's shape needs a GPU, and here is none. Try the cases with --tiny")
    cases = choose_cases(options.only)
    threads = min(MOST_THREADS, os.cpu_count() or 1) if gpus else 1
    setups = {case.name: make_setup(case, options.tiny, threads, overrides) for case in cases}
    variables = shape_variables(resolve(setups[cases[0].name]), 1)
    peers = [tell(peer, variables) for peer in parse_peers(options.peer, threads)]
    hardware = find_hardware(torch.cuda.get_device_name(0)) if gpus else load_hardware()["cpu"]
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        case.name: partial(run_ours, setups[case.name], hardware)
        for case in cases
        if case.gpus <= (gpus or 2)
    }
    runs |= {f"peer {peer.name}": partial(run_peer, peer) for peer in peers}
    path, document = open_record(options)
    run_cases(runs, options, path, document)
    return BenchResult(None, document["figures"], gpu_text(document["figures"], [*setups, *runs]))


def choose_cases(names: Sequence[str]) -> list[GpuCase]:
    """Those of these names; all without. Raises BenchError for a name that there is not."""
    if unknown := set(names) - {case.name for case in CASES}:
        raise BenchError(
            f"--only {' '.join(sorted(unknown))}: there is no such case. They are:\n"
            + "\n".join(f"  {case.name}" for case in CASES)
        )
    return [case for case in CASES if not names or case.name in names]


def make_setup(case: GpuCase, tiny: bool, threads: int, overrides: Sequence[str]) -> Setup:
    """The run of train.main; the user's keys win."""
    keys = f"{COMMON} {SHAPE_8B} {case.keys} {TINY if tiny else ''}".split()
    return Setup(case.gpus, threads, [*(f"--{key}" for key in keys), *overrides], STEPS_PER_REPORT)


def run_ours(setup: Setup, hardware: Hardware | None) -> dict[str, Any]:
    """Config, figures, and what the planner says: null of a GPU that no file in configs/hardware describes.
    Raises BenchError where the run fails."""
    config = resolve(setup)
    predicted = hardware and predict_run(config.job, setup.processes, setup.threads, hardware)
    return {
        "config": config_to_record(config),
        "predicted": predicted and dataclasses.asdict(predicted),
        "run": dataclasses.asdict(measure_run(setup, {})),
    }


def run_peer(peer: Contender) -> dict[str, Any]:
    """Its figures, without config and prediction. Raises BenchError where it fails."""
    return {"run": peer.run({})}


def open_record(options: argparse.Namespace) -> tuple[Path | None, dict[str, Any]]:
    """The newest record of the name that was given, else a new one; without a name one that is not kept.
    Raises BenchError where the newest is of another machine, torch or shape."""
    figures: dict[str, Any] = {"shape": "tiny" if options.tiny else "8b", "cases": {}}
    document = harness.make_document("gpu", options.command, None, figures)
    if options.record is None:
        return None, document
    name = options.record or "gpu"
    harness.check_name(name)
    found = sorted(harness.RECORDS.glob(f"????-??-??-{name}.json"))
    if not found:
        return harness.RECORDS / f"{document['date']}-{name}.json", document
    kept: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))
    for section, key in SAME:
        before, now = kept[section].get(key), document[section].get(key)
        if before != now:
            raise BenchError(
                f"--record {name}: {found[-1].name} is of {key} {before}, here it is {now}. Name another "
                "record"
            )
    return found[-1], kept


def save_record(path: Path, document: dict[str, Any]) -> None:
    """Write the file by one rename: a call that is cut off leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(harness.without_names(document), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def run_cases(
    runs: Mapping[str, Callable[[], dict[str, Any]]],
    options: argparse.Namespace,
    path: Path | None,
    document: dict[str, Any],
) -> None:
    """Run what the record has not, all of them once, then again for the next round, so that a machine that
    drifts hurts all alike. One that fails does not cost the others; the next call tries it again."""
    stop_at = time.monotonic() + 60 * options.minutes
    for turn, name in ((turn, name) for turn in range(options.rounds) for name in runs):
        case = document["figures"]["cases"].setdefault(name, {"runs": [], "reason": None})
        if len(case["runs"]) > turn:
            continue
        if time.monotonic() > stop_at:
            print("time is over: the same command goes on with the other cases", file=sys.stderr, flush=True)
            break
        print(f"{name} ...", file=sys.stderr, flush=True)
        began_at = time.monotonic()
        try:
            found = runs[name]()
            case["runs"].append({**found.pop("run"), "took_s": time.monotonic() - began_at})
            case |= {**found, "reason": None}
        except USER_ERRORS as error:
            case["reason"] = f"{type(error).__name__}: {error}"
        case |= {
            "date": datetime.date.today().isoformat(),
            "commit": harness.find_versions()["commit"],
        }
        ended = (case["reason"] or "done").splitlines()[0]
        print(f"  {ended}, {time.monotonic() - began_at:.0f} s", file=sys.stderr, flush=True)
        if path is not None:
            save_record(path, document)
    if path is not None:
        print(f"recorded: tools/bench/records/{path.name}", file=sys.stderr)


def gpu_text(figures: Mapping[str, Any], names: Sequence[str]) -> str:
    """A row for each case that was measured, how far off the planner was, and why there is no row."""
    head = (
        "case",
        "tokens/s a GPU",
        "spread",
        "runs",
        "MFU full",
        "causal",
        "step ms",
        "predicted",
        "GiB",
        "predicted",
    )
    cases = {name: figures["cases"].get(name) or {"runs": [], "reason": None} for name in names}
    rows = [_cells(name, case) for name, case in cases.items() if case["runs"]]
    errors = [
        abs(case["predicted"]["step_s"] / _step_s(case) - 1)
        for case in cases.values()
        if case["runs"] and case.get("predicted")
    ]
    parts = [f"shape: {figures['shape']}", *([format_table(head, rows)] if rows else [])]
    if errors:
        parts.append(
            f"steps predicted: mean error {statistics.mean(errors):.1%} (asked: {MEAN_ERROR:.0%}), worst "
            f"{max(errors):.1%} (asked: {WORST_ERROR:.0%})"
        )
    return "\n\n".join([*parts, "\n".join(_missing(cases))]).rstrip()


def _cells(name: str, case: Mapping[str, Any]) -> tuple[str, ...]:
    """The median over the runs; their spread, or of one run that of its reports."""
    runs, predicted = case["runs"], case.get("predicted") or {}
    rates = [run["tokens_per_s_per_rank"] for run in runs]
    middle = statistics.median(rates)
    apart = spread(rates, middle) if len(runs) > 1 else runs[0].get("spread")
    step_s, predicted_s = _step_s(case), predicted.get("step_s")
    return (
        name,
        f"{middle:,.0f}",
        _cell(apart, ".1%"),
        str(len(runs)),
        *(_cell(runs[-1].get(key), ".1%") for key in MFUS),
        _cell(step_s and 1e3 * step_s, ",.0f"),
        _cell(predicted_s and 1e3 * predicted_s, ",.0f"),
        _cell(runs[-1]["peak_memory_gib"], ".1f"),
        _cell(predicted.get("peak_gib"), ".1f"),
    )


def _step_s(case: Mapping[str, Any]) -> Any:
    """Of the last reports, after the warm-up; None of a peer, which does not say it."""
    return statistics.median(run["step_times_s"][-1] for run in case["runs"]) if "config" in case else None


def _missing(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    gpus = {case.name: case.gpus for case in CASES}
    for name, case in cases.items():
        if case["reason"]:
            yield f"failed: {name}: {case['reason'].splitlines()[-1].strip()}"
        elif not case["runs"]:
            yield f"not measured: {name}" + (f" ({gpus[name]} GPUs)" if gpus.get(name, 1) > 1 else "")


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


MEASUREMENT = Measurement(
    "gpu",
    add_gpu_options,
    measure_gpu,
    summary="one GPU, or two, at Llama 8B's shape, key by key",
    description=(
        "Run train.main at Llama 8B's shape, 8 layers unless a case says otherwise, one sequence of 8,192 "
        "tokens for each GPU, with one thing changed at a time, and print tokens per second, both MFUs and "
        "memory beside what the planner predicted. With --record every finished case is in the file at once; "
        "the same command again goes on with those that are missing."
    ),
    epilog=f"Cases: {'; '.join(case.name for case in CASES)}.",
    keeps_record=True,
)
