"""What checkpoints contain: the list of a run's, their bytes verified, tensors and totals."""

import math
import time
from pathlib import Path
from typing import Any

from meshwright.parallel.memory_breakdown import GIB
from meshwright.tools.cli import format_table
from meshwright.train.checkpoint.commit import checkpoints_folder, list_checkpoints, step_of
from meshwright.train.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.train.checkpoint.training_record import describe_training
from meshwright.train.errors import CheckpointError


def describe_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Describe each committed checkpoint, oldest first: step, samples, number of processes that saved it,
    size in bytes, age in seconds.

    Values from a manifest that cannot be read are None, with the reason under `problem`.
    """
    rows = []
    for path in list_checkpoints(folder):
        row: dict[str, Any] = {"step": step_of(path), "samples": None, "processes": None}
        try:
            position = read_manifest(path).position
            row |= {"samples": position.samples, "processes": position.world_size}
        except CheckpointError as error:
            row["problem"] = str(error)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        age_s = max(0.0, time.time() - path.lstat().st_mtime)  # since the last file was added
        rows.append({**row, "size_bytes": size, "age_s": age_s, "path": path})
    return rows


def verify(path: Path) -> dict[str, Any]:
    """Hash every byte of a checkpoint, or of all checkpoints of a run; return paths, bytes and seconds.
    Raises CheckpointError for the first one that is damaged or contains other files, and if there is none."""
    # late: imports torch, which takes longer than a list of checkpoints
    from meshwright.train.checkpoint.verify import raise_damage, unnamed_files, verify_alone

    checkpoints = [path] if (path / MANIFEST).is_file() else list_checkpoints(checkpoints_folder(path))
    if not checkpoints:
        raise CheckpointError(f"{path} contains no committed checkpoint: name another run or a checkpoint")
    start_s = time.perf_counter()
    manifests = [verify_alone(checkpoint) for checkpoint in checkpoints]
    for checkpoint, manifest in zip(checkpoints, manifests, strict=True):
        raise_damage(checkpoint, unnamed_files(checkpoint, manifest))
    size_bytes = sum(file.size_bytes for manifest in manifests for file in manifest.files.values())
    return {"verified": checkpoints, "size_bytes": size_bytes, "seconds": time.perf_counter() - start_s}


def describe_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Describe a checkpoint from its manifest: position, tensors, totals and versions. Totals are by the
    first part of a name: model, optim, random; `run` says what a start in its folder does. Raises
    CheckpointError."""
    manifest = read_manifest(checkpoint)
    tensors: list[dict[str, Any]] = []
    totals: dict[str, dict[str, int]] = {}
    for name, saved in manifest.tensors.items():
        tensors.append(
            {"name": name, "shape": saved.shape, "dtype": saved.dtype, "size_bytes": saved.size_bytes}
        )
        total = totals.setdefault(name.split(".")[0], {"tensors": 0, "elements": 0, "size_bytes": 0})
        total["tensors"] += 1
        total["elements"] += math.prod(saved.shape)
        total["size_bytes"] += saved.size_bytes
    training = describe_training(checkpoint.parent.parent)
    origin = {"checkpoint": checkpoint, "position": manifest.position, "code": manifest.code, "run": training}
    return {**origin, "tensors": tensors, "totals": totals}


def list_text(path: Path, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return f"{path}: no committed checkpoint"
    cells = []
    for row in rows:
        saved = ("?" if row[key] is None else str(row[key]) for key in ("step", "samples", "processes"))
        cells.append((*saved, f"{row['size_bytes'] / GIB:.3f}", _age(row["age_s"]), str(row["path"])))
    table = format_table(("step", "samples", "processes", "size GiB", "age", "path"), cells)
    return "\n".join([table, *(row["problem"] for row in rows if "problem" in row)])


def verify_text(verified: dict[str, Any]) -> str:
    rate = verified["size_bytes"] / 1e9 / max(verified["seconds"], 1e-9)
    lines = [f"{path}: every byte matches the manifest" for path in verified["verified"]]
    return "\n".join(
        [*lines, f"{verified['size_bytes'] / GIB:.3f} GiB in {verified['seconds']:.1f} s, {rate:.2f} GB/s"]
    )


def show_text(shown: dict[str, Any]) -> str:
    tensors = format_table(
        ("tensor", "shape", "dtype"),
        [(t["name"], " x ".join(map(str, t["shape"])) or "scalar", t["dtype"]) for t in shown["tensors"]],
    )
    totals = format_table(
        ("total of", "tensors", "elements", "GiB"),
        [
            (kind, str(t["tensors"]), f"{t['elements']:,}", f"{t['size_bytes'] / GIB:.3f}")
            for kind, t in shown["totals"].items()
        ],
    )
    position = shown["position"]
    saved_by = f"step {position.step}, {position.samples} samples, saved by {position.world_size} processes"
    return f"{shown['checkpoint']}: {saved_by}\n{shown['run']}\n\n{tensors}\n\n{totals}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
