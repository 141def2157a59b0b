"""The record of the fake GPU's steps (record.json): what a steady step of each plan launches, sends and
holds.

    python -m tests.fake_gpu.record    # write it anew: a difference is a decision, and named in the commit

The figures belong to the torch and the Triton of tests/fake_gpu/install.py. None of them is a time.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.fake_gpu import log
from tests.fake_gpu.install import ROOT, FakeGpu, install
from tests.fake_gpu.log import Call
from tests.fake_gpu.plans import CASES, WORLD

PATH = Path(__file__).with_name("record.json")
STEPS = 3  # the first compiles, the second still fills caches, the third is like all later ones
LIMIT_S = 400


def run_steps(gpu: FakeGpu, scratch: Path, arguments: Sequence[str], root: Path = ROOT, **env: str) -> Any:
    """tests/fake_gpu/step.py of the project in `root`, in a process of its own; the result has returncode,
    stdout and stderr. Its log and its caches are in `scratch` then."""
    command = [
        sys.executable,
        "-m",
        "tests.fake_gpu.step",
        str(WORLD),
        str(STEPS),
        str(scratch / "memory.json"),
        *arguments,
    ]
    return subprocess.run(
        command,
        env={**gpu.environment(scratch, root=root), **env},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def steady_step(calls: Sequence[Call]) -> list[Call]:
    """The last step's calls."""
    return log.between(calls, f"step {STEPS - 1}", f"end {STEPS - 1}")


def figures_of(scratch: Path) -> dict[str, Any]:
    """What the record says of one plan, from the log and the memory file of its run."""
    calls = log.read_log(scratch)
    step, peaks = steady_step(calls), json.loads((scratch / "memory.json").read_text())
    waits = log.stream_waits(calls[: calls.index(Call("mark", 0, (f"end {STEPS - 1}",)))], step)
    names = _stream_names(step, waits)
    return {
        "launches": log.count_launches(step),
        "blocks": sum(_blocks(call) for call in step if call.kind in ("kernel", "triton")),
        "kernels": {
            f"{kernel.name}, {kernel.registers} registers, {kernel.stack_bytes} B of stack": count
            for kernel, count in sorted(log.triton_launches(step).items())
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
            for c, before in zip(log.collectives(step), _launches_before(step), strict=True)
        ],
        "streams": dict(Counter(names[c.stream] for c in step if c.kind in log.ON_STREAMS)),
        "waits": {f"{names[one]} for {names[other]}": count for (one, other), count in sorted(waits.items())},
        "peak_allocated_bytes": peaks["allocated"],
        "peak_reserved_bytes": peaks["reserved"],
    }


def _launches_before(step: Sequence[Call]) -> list[int]:
    """Of each collective, the launches on the default stream before it: prefetching shows in them."""
    counts, launches = [], 0
    for call in step:
        launches += call.kind in log.LAUNCHES and call.stream == 0
        if call.kind == "nccl":
            counts.append(launches)
    return counts


def _blocks(launch: Call) -> int:
    """Of a kernel of torch's or Triton's: its grid's."""
    grid = launch.words[1 if launch.kind == "kernel" else 3]
    return math.prod(map(int, grid.split(",")))


def _stream_names(step: Sequence[Call], waits: Iterable[tuple[int, int]]) -> dict[int, str]:
    """Streams by the order of their first use; the default one is that on which the step computes."""
    used = (call.stream for call in step if call.kind in log.ON_STREAMS)
    order = list(dict.fromkeys([0, *used, *sorted(stream for pair in waits for stream in pair)]))
    return {stream: f"stream {number}" for number, stream in enumerate(order)}


def _torch_kernels(step: Sequence[Call]) -> Counter[str]:
    """torch's own kernels by the name of their function, without what its templates were given."""
    return Counter(_function_name(call.words[0]) for call in step if call.kind == "kernel")


def _function_name(mangled: str) -> str:
    """The innermost function of a mangled C++ name: its identifiers are written with their lengths (Itanium
    C++ ABI)."""
    name, at = "", re.match(r"_ZN?", mangled)
    rest = mangled[at.end() :] if at else ""
    while found := re.match(r"(\d+)", rest):
        start = found.end()
        name, rest = rest[start : start + int(found[1])], rest[start + int(found[1]) :]
    return name or mangled


def make_record(gpu: FakeGpu) -> dict[str, Any]:
    """The figures of every case. Raises RuntimeError with what a step that fails has printed."""
    record = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            result = run_steps(gpu, Path(folder), case.arguments)
            if result.returncode != 0:
                raise RuntimeError(f"{name}:\n{result.stderr}")
            record[name] = figures_of(Path(folder))
    return record


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PATH.write_text(json.dumps(make_record(install()), indent=1) + "\n")
    print(f"written: {PATH.relative_to(ROOT)}; git diff shows what has changed")
