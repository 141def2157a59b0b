"""The differences between two checkpoints, saved on any mesh."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.tools.cli import format_table
from meshwright.train.checkpoint.layout import RANDOM
from meshwright.train.checkpoint.manifest import CheckpointManifest
from meshwright.train.checkpoint.reader import TensorFiles, open_checkpoint, read_full
from meshwright.train.checkpoint.verify import verify_alone


def compare_checkpoints(first: Path, second: Path) -> dict[str, Any]:
    """Verify and compare two checkpoints, with one pair of tensors in memory at a time. The number of
    processes and the random state are not compared. Raises CheckpointError.

    Returns `position`: keys with both values; `config`: lines of a unified diff; `tensors` that differ;
    `compared`: number of tensors compared; and whether all is the `same`.
    """
    manifests = [verify_alone(checkpoint) for checkpoint in (first, second)]
    opened = [(open_checkpoint(*each), each[1]) for each in zip((first, second), manifests, strict=True)]
    positions = [vars(manifest.position) for manifest in manifests]
    position = {
        key: (value, positions[1][key])
        for key, value in positions[0].items()
        if value != positions[1][key] and key != "world_size"
    }
    config = [
        *difflib.unified_diff(_config(first), _config(second), "config.yaml", "config.yaml", lineterm="", n=0)
    ]
    either = {**manifests[0].tensors, **manifests[1].tensors}
    names = [name for name in either if not name.startswith(RANDOM)]
    tensors = [difference for name in names if (difference := _compare(name, opened))]
    same = not (position or config or tensors)
    return {"position": position, "config": config, "tensors": tensors, "compared": len(names), "same": same}


def difference_text(differences: dict[str, Any]) -> str:
    """Format the differences: the position, the config's lines, and the first 40 tensors that differ."""
    lines = [f"{key}: {value_1} | {value_2}" for key, (value_1, value_2) in differences["position"].items()]
    lines += [
        line for line in differences["config"] if line[:1] in "+-" and not line.startswith(("+++", "---"))
    ]
    rows = [
        (t["name"], t["here"], t["there"], "" if t["largest"] is None else f"{t['largest']:.3g}")
        for t in differences["tensors"]
    ]
    if not rows:
        return "\n".join([*lines, f"all {differences['compared']} tensors are equal"])
    table = format_table(("tensor", "here", "there", "largest difference"), rows[:40])
    return "\n".join([*lines, table, f"{len(rows)} of {differences['compared']} tensors differ"])


def _compare(name: str, opened: Sequence[tuple[TensorFiles, CheckpointManifest]]) -> dict[str, Any] | None:
    """Return how a tensor differs: shape and dtype in both, or "missing", and the largest absolute difference
    of a value if shape and dtype are the same. None if it does not differ."""
    here, there = (manifest.tensors.get(name) for _, manifest in opened)
    largest = None
    if here == there:
        a, b = (read_full(files, manifest, name) for files, manifest in opened)
        if torch.equal(a, b):
            return None
        largest = (a.double() - b.double()).abs().max().item()
    shown = {"here": str(here or "missing"), "there": str(there or "missing")}
    return {"name": name, **shown, "largest": largest}


def _config(checkpoint: Path) -> list[str]:
    path = checkpoint / "config.yaml"
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
