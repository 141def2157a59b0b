"""`bench gpu`: what one GPU does with Llama 8B's shape, end to end, part by part and beside its peers; it can
be gone on with."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from meshwright.tools.bench.case_record import CaseRecord, open_record
from meshwright.tools.bench.gpu.cases import LLAMA_8B, TINY, GpuCase, make_cases
from meshwright.tools.bench.gpu.report import gpu_text
from meshwright.tools.bench.gpu.runs import AbsentError, GpuMachine, OutOfTimeError, config_of, measure_case
from meshwright.tools.bench.harness import KEYS, BenchResult
from meshwright.tools.cli import positive
from meshwright.tools.processes import BenchError
from meshwright.train.errors import USER_ERRORS

SUMMARY = "one GPU: end to end at Llama 8B's shape, its parts, its peers"
DESCRIPTION = (
    "Measure one GPU, the most important first: train.main at Llama 8B's shape with 4, 8, 16 and 32 layers, "
    "by micro batch, checkpointing and dtypes, with what the planner predicts beside it; the same model in "
    "plain PyTorch, in torchtitan and in transformers with accelerate (those that are not installed are "
    "named); where a step's time goes, by kernel; attention by kernel, head and loss, the optimizer, "
    "products and copies alone. With --record every finished case is in the file at once; the same command "
    "again goes on with those that are missing."
)
EPILOG = KEYS
GRACE_S = 35.0  # that a case which has begun may take beyond --minutes
MOST_THREADS = 8  # of the CPU: what feeds a GPU needs no more


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    """Options of `gpu`."""
    parser.add_argument(
        "--minutes",
        type=positive,
        default=9,
        metavar="N",
        help=f"start no case after this long, and end one {GRACE_S:.0f} s later (default 9)",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORDS", help="cases with one of these words in their names"
    )
    parser.add_argument("--again", action="store_true", help="measure the cases again that the record has")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, to see that everything works; the record says so"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one"
    )


def measure_gpu(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """All cases that time allows. Raises BenchError and ConfigError for what cannot be begun."""
    machine = find_machine(options.device, options.tiny, overrides)
    cases = choose_cases(make_cases(machine.shape), options.only)
    config_of(
        machine, next(case.work for case in make_cases(machine.shape) if not isinstance(case.work, str))
    )
    name = None if options.record is None else options.record or "gpu"
    kept = open_record(name, options.command, machine.shape.name)
    for case in cases if options.again else ():
        kept.forget(case.name)
    run_cases(cases, kept, machine, time.monotonic() + 60 * options.minutes)
    if kept.path is not None:
        print(f"recorded: tools/bench/records/{kept.path.name}", file=sys.stderr)
    figures = kept.document["figures"]
    return BenchResult(None, figures, gpu_text(figures, make_cases(machine.shape)))


def find_machine(device: str, tiny: bool, overrides: Sequence[str]) -> GpuMachine:
    """The device, and the shape for it. Raises BenchError for the whole shape without a GPU."""
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if device == "cuda" and not on_gpu:
        raise BenchError(
            "--device=cuda: this machine has no GPU that torch can use. Leave it out, with --tiny"
        )
    if not on_gpu and not tiny:
        raise BenchError("gpu: Llama 8B's shape needs a GPU, and here is none. Try the suite with --tiny")
    name = torch.cuda.get_device_name(0) if on_gpu else "cpu"
    threads = min(MOST_THREADS, os.cpu_count() or 1) if on_gpu else 1
    return GpuMachine(
        "cuda" if on_gpu else "cpu", name, TINY if tiny else LLAMA_8B, threads, tuple(overrides)
    )


def choose_cases(cases: Sequence[GpuCase], words: Sequence[str]) -> list[GpuCase]:
    """Those with one of the words in their names; all without words. Raises BenchError where there is
    none."""
    chosen = [case for case in cases if not words or any(word in case.name for word in words)]
    if not chosen:
        raise BenchError(
            f"--only {' '.join(words)}: no case has that in its name. They are:\n"
            + "\n".join(f"  {case.name}" for case in cases)
        )
    return chosen


def in_turns(cases: Sequence[GpuCase]) -> Iterator[tuple[int, GpuCase]]:
    """All of them once, then those again that are to be repeated: a machine that drifts shows."""
    for turn in range(max(case.repeats for case in cases)):
        yield from ((turn, case) for case in cases if case.repeats > turn)


def run_cases(cases: Sequence[GpuCase], kept: CaseRecord, machine: GpuMachine, stop_at: float) -> None:
    """Measure what the record has not, until `stop_at` (of time.monotonic). One that fails does not cost the
    others."""
    for turn, case in in_turns(cases):
        if kept.runs(case.name) > turn:
            continue
        if time.monotonic() > stop_at:
            print("time is over: the same command goes on with the other cases", file=sys.stderr, flush=True)
            return
        try:
            run_case(case, kept, machine, stop_at + GRACE_S)
        except OutOfTimeError:
            print(f"{case.name}: cut off, time is over", file=sys.stderr, flush=True)
            return


def run_case(case: GpuCase, kept: CaseRecord, machine: GpuMachine, end_at: float) -> None:
    """One run of one case into the record, or why there is none. Raises OutOfTimeError."""
    print(f"{case.name} ...", file=sys.stderr, flush=True)
    began_at, config = time.monotonic(), None
    try:
        config = config_of(machine, case.work)
        figures = measure_case(case, machine, end_at)
        kept.add(case.name, config, {**figures, "took_s": time.monotonic() - began_at})
    except AbsentError as error:
        kept.give_up(case.name, "absent", config, str(error))
    except USER_ERRORS as error:
        kept.give_up(case.name, "failed", config, f"{type(error).__name__}: {error}")
    state = kept.cases[case.name]
    print(
        f"  {state['reason'] or 'done'}, {time.monotonic() - began_at:.0f} s".splitlines()[0],
        file=sys.stderr,
        flush=True,
    )
