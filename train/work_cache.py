"""Traced work, kept on disk: what a module does depends on its config, our code and torch, and takes seconds
to find out."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.planner.workload import Linear, ModuleWork, Operation, Phase

TRACED_CODE = ("models", "parallel", "train/work.py")  # what a trace depends on


def remember(folder: Path, case: object, trace: Callable[[], ModuleWork]) -> ModuleWork:
    """The work of a case, which its repr describes in full: read from `folder`, or traced and written there.
    A file that cannot be read or written is as none: the trace is made again."""
    key = hashlib.sha256(f"{case!r} {torch.__version__} {_digest_of_code()}".encode()).hexdigest()
    path = folder / f"work-{key[:32]}.json"
    try:
        return work_from(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError):
        work = trace()
    own = path.with_suffix(f".{os.getpid()}")  # ranks write at the same time
    with contextlib.suppress(OSError, ValueError):  # ValueError: a name that no file can have
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps(dataclasses.asdict(work)), encoding="utf-8")
        own.replace(path)
    return work


def work_from(values: dict[str, Any]) -> ModuleWork:
    """What dataclasses.asdict has made of it, back."""
    forward, backward = (_phase_from(values[name]) for name in ("forward", "backward"))
    keeps, output = (Linear(**values[name]) for name in ("keeps", "output"))
    return ModuleWork(
        values["parameters"], forward, backward, keeps, output, tuple(map(tuple, values["weights"]))
    )


def _phase_from(values: dict[str, Any]) -> Phase:
    operations = (
        Operation(one["kind"], one["name"], Linear(**one["flops"]), Linear(**one["bytes"]), one["dtype"])
        for one in values["operations"]
    )
    return Phase(tuple(operations), tuple(Linear(**moment) for moment in values["live"]))


@cache
def _digest_of_code() -> str:
    """Changes with every change of the code that is traced, and of that which traces."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for name in TRACED_CODE:
        for path in [root / name] if name.endswith(".py") else sorted((root / name).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
