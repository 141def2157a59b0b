"""The record of the fake GPU's steps (record.json): launches, collectives, copies, waits and memory of a
steady step of each plan.

    python -m tests.fake_gpu.record    # write it again: name the differences in the commit message

The figures depend on the versions of torch and Triton in tools/dryrun/install.py. None of them is a time.
"""

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.parallel.planner.hardware import load_hardware, machines_of_kind
from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.install import ROOT, FakeGpu, step_command
from meshwright.tools.dryrun.log import MEMORY_FILE, PLAN_FILE, Call, grid_blocks, steady_step, stream_numbers
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import plan_for
from tests.fake_gpu.calls import collectives, count_launches, function_name, steady_waits, triton_launches
from tests.fake_gpu.commands import install_for_tests
from tests.fake_gpu.plans import CASES

PATH = Path(__file__).with_name("record.json")
LIMIT_S = 400


def plan_on_h100(arguments: Sequence[str], world_size: int) -> Plan:
    """Return the plan of the config arguments for H100s in nodes of eight."""
    machines = machines_of_kind(load_hardware()["h100-sxm"], world_size, 8)
    return plan_for(parse_config(arguments).job, machines)


def run_steps(
    gpu: FakeGpu,
    scratch: Path,
    arguments: Sequence[str],
    root: Path = ROOT,
    world_size: int = 8,
    **env: str,
) -> Any:
    """Run the steps of rank 0 in a separate process; its plan, log and caches are written to
    `scratch`. The result has returncode, stdout and stderr."""
    (scratch / PLAN_FILE).write_text(plan_to_yaml(plan_on_h100(arguments, world_size)))
    return subprocess.run(
        step_command(scratch, arguments),
        env={**gpu.environment(scratch, root=root), **env},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def figures_of(scratch: Path) -> dict[str, Any]:
    """Return the record's figures of one plan, from the log and the memory file of its run."""
    calls = log.read_log(scratch)
    step, peaks = steady_step(calls), json.loads((scratch / MEMORY_FILE).read_text())
    waits = steady_waits(calls)
    names = {stream: f"stream {n}" for stream, n in stream_numbers(step, chain(*waits)).items()}
    return {
        "launches": count_launches(step),
        "blocks": sum(grid_blocks(call) for call in step if call.kind in ("kernel", "triton")),
        "kernels": {
            f"{kernel.name}, {kernel.registers} registers, {kernel.stack_bytes} B of stack": count
            for kernel, count in sorted(triton_launches(step).items())
        },
        "torch_kernels": dict(sorted(_torch_kernels(step).items())),
        "products": dict(sorted(Counter(" ".join(c.words[:3]) for c in step if c.kind == "gemm").items())),
        "cudnn": dict(sorted(Counter(c.words[0] for c in step if c.kind == "cudnn").items())),
        "copies": dict(
            sorted(
                Counter(
                    f"{c.words[0]} {c.words[1]} B, {names[c.stream]}" for c in step if c.kind == "memcpy"
                ).items()
            )
        ),
        "collectives": [
            f"{c.op} {c.bytes} B, {c.ranks} ranks, {names[c.stream]}, after {before} launches of the step"
            for c, before in zip(collectives(step), _launches_before(step), strict=True)
        ],
        "streams": dict(Counter(names[c.stream] for c in step if c.kind in log.ON_STREAMS)),
        "waits": {
            f"{names[waiting]} for {names[awaited]}": count
            for (waiting, awaited), count in sorted(waits.items())
        },
        "peak_allocated_bytes": peaks["allocated"],
        "peak_reserved_bytes": peaks["reserved"],
    }


def _launches_before(step: Sequence[Call]) -> list[int]:
    """Return the number of launches on the default stream before each collective; it depends on
    prefetching."""
    counts, launches = [], 0
    for call in step:
        launches += call.kind in log.LAUNCHES and call.stream == 0
        if call.kind == "nccl":
            counts.append(launches)
    return counts


def _torch_kernels(step: Sequence[Call]) -> Counter[str]:
    """Return the number of launches of torch's kernels by function name, without template arguments."""
    return Counter(function_name(call.words[0]) for call in step if call.kind == "kernel")


def make_record(gpu: FakeGpu) -> dict[str, Any]:
    """Return the figures of every case. Raises RuntimeError with the output of a failed step."""
    record = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            result = run_steps(gpu, Path(folder), case.arguments, world_size=case.world_size)
            if result.returncode != 0:
                raise RuntimeError(f"{name}:\n{result.stderr}")
            record[name] = figures_of(Path(folder))
    return record


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PATH.write_text(json.dumps(make_record(install_for_tests()), indent=1) + "\n")
    print(f"written: {PATH.relative_to(ROOT)}; git diff shows the changes")
