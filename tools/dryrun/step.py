"""The steps of rank 0 on the fake GPU, with the real model, plan, collectives and compiler. The kernels
compute nothing.

    python -m meshwright.tools.dryrun.step SCRATCH [--record] --config=llama_8b.yaml [--section.key=value]

SCRATCH has the plan (plan.yaml). The log (log.py) gets a mark "step N" before and "end N" after each step,
and memory.json the caching allocator's peaks in the last step. With --record one more step is recorded:
trace.json has its kernels and their operators, operators.json the operators' tensors, axes.json the mesh axes
by process group, waits.json the lines of code at which the host waits.
"""

import argparse
import ctypes
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend fake)

from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.profiler_annotations import name_units
from meshwright.parallel.simulate.collectives import axes_of_groups
from meshwright.tools.cli import run_tool
from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.install import PROGRESS
from meshwright.train.config import Config
from meshwright.train.config_parser import parse_config
from meshwright.train.data.sequences import Batch
from meshwright.train.data.training_data import make_batch_shape, to_device
from meshwright.train.distributed.process_group import use_expandable_segments
from meshwright.train.planning.resolve import check_device_support
from meshwright.train.training import build_training

DEVICE = torch.device("cuda", 0)


def main() -> None:
    """Run the steps of the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--record", dest="record_step", action="store_true")
    options, arguments = parser.parse_known_args()
    run_steps(options.scratch, options.record_step, arguments)


def run_steps(scratch: Path, record_step: bool, arguments: list[str]) -> None:
    """Run the steps of the plan in `scratch`, and write the files there."""
    config, plan = parse_config(arguments), load_plan(scratch / log.PLAN_FILE)
    use_expandable_segments()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "cpu:fake,cuda:nccl",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=plan.mesh.world_size,
    )
    check_device_support(config.job, plan, DEVICE)
    mesh = build_mesh(plan.mesh, "cuda")
    report("building the model")
    training = build_training(config, plan, mesh, loaded=True)  # memory reads as 0: values need no check
    sharded = training.sharded
    for number in range(log.STEPS):
        report(f"step {number + 1} of {log.STEPS}" + (", which compiles" if number == 0 else ""))
        batch = make_batch(plan, config, mesh)
        torch.cuda.reset_peak_memory_stats()
        with marked(number):
            training.step([batch] * plan.accumulation)
    stats = torch.cuda.memory_stats()
    peaks = {kind: stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved")}
    (scratch / log.MEMORY_FILE).write_text(json.dumps(peaks))
    if record_step:
        report("recording one more step")
        (scratch / log.AXES_FILE).write_text(json.dumps(axes_of_groups(mesh, sharded.data_group)))
        batch = make_batch(plan, config, mesh)
        record(scratch, sharded.model, plan, lambda: training.step([batch] * plan.accumulation))


def make_batch(plan: Plan, config: Config, mesh: DeviceMesh) -> Batch:
    """Return a micro batch on the device: one document per sequence."""
    tokens = torch.zeros(plan.micro_batch_size, config.train.seq_len, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens.clone() if config.data.document_mask else None)
    return to_device(make_batch_shape(plan, mesh).local_tokens(batch), DEVICE)


def report(text: str) -> None:
    """Print a line of progress for the process that started this one."""
    print(f"{PROGRESS}{text}", flush=True)


@contextmanager
def marked(number: int) -> Iterator[None]:
    """Mark the begin and the end of a step in the log."""
    mark = ctypes.CDLL("libfakecore.so").fake_mark
    mark(f"step {number}".encode())
    yield
    mark(f"end {number}".encode())


def record(scratch: Path, model: nn.Module, plan: Plan, step: Callable[[], object]) -> None:
    """Record a step: its kernels and annotations in a trace, its operators in an execution trace."""
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(scratch / log.OPERATORS_FILE))
    name_units(model, plan)
    with torch.profiler.profile(
        record_shapes=True, acc_events=True, execution_trace_observer=observer
    ) as profile:
        with marked(log.STEPS):
            waits = note_waits(step)
        torch.cuda.synchronize()
    (scratch / log.WAITS_FILE).write_text(json.dumps(waits))
    profile.export_chrome_trace(str(scratch / log.TRACE_FILE))


def note_waits(step: Callable[[], object]) -> list[str]:
    """Run a step, and return file:line of the Python code that called each operator for which the host
    waits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in caught if "synchronizing" in str(each.message)]


if __name__ == "__main__":
    run_tool(main)
    sys.stdout.flush()
    os._exit(0)  # NCCL's threads would wait for peers that do not exist
