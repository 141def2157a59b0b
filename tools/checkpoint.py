"""`python -m tools.checkpoint ls|verify|show|diff|consolidate PATH`: list, verify, show, compare and
consolidate checkpoints, saved on any mesh."""

import argparse
import difflib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from meshwright.parallel.memory_breakdown import GIB
from meshwright.tools.cli import format_table, run_tool, to_json
from meshwright.tools.load_weights import (
    checkpoints_folder,
    find_newest,
    load_full_weights,
    read_full_tensors,
    write_weights,
)
from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.checkpoint.layout import RANDOM
from meshwright.train.checkpoint.manifest import MANIFEST, CheckpointManifest, read_manifest
from meshwright.train.checkpoint.ownership import describe_training, read_training
from meshwright.train.checkpoint.reader import TensorFiles, open_checkpoint
from meshwright.train.checkpoint.verify import raise_damage, unnamed_files, verify_alone
from meshwright.train.errors import CheckpointError
from meshwright.train.files import replacing

EXIT_DIFFERENT = 1  # as diff(1)
NEWEST = ("CHECKPOINT", "a checkpoint, or a run (its newest checkpoint)")
# Subcommand: its help, and metavar and help of its path.
COMMANDS = {
    "ls": (
        "list the committed checkpoints of a run",
        "RUN_OR_CHECKPOINTS_DIR",
        "a run's folder, or its checkpoints folder",
    ),
    "verify": (
        "compare every byte with the manifest; exit code 0 only if all match",
        "CHECKPOINT_OR_RUN",
        "a checkpoint, or a run (all its checkpoints)",
    ),
    "show": ("list the tensors of a checkpoint, with totals", *NEWEST),
    "diff": ("compare config, tensors and values of two; exit code 1 if anything differs", *NEWEST),
    "consolidate": ("write the full model, without the optimizer, into one safetensors file", *NEWEST),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested subcommand. Raises CheckpointError."""
    options = make_parser().parse_args(arguments)
    path = Path(options.path)
    if options.command == "ls":
        rows = describe_checkpoints(checkpoints_folder(path))
        print(to_json({"checkpoints": rows}) if options.json else _list_text(path, rows))
    elif options.command == "verify":
        verified = verify(path)
        print(to_json(verified) if options.json else _verify_text(verified))
    elif options.command == "show" and read_training(path) and not list_checkpoints(checkpoints_folder(path)):
        print(to_json({"run": describe_training(path)}) if options.json else describe_training(path))
    elif options.command == "show":
        shown = describe_checkpoint(find_newest(path))
        print(to_json(shown) if options.json else _show_text(shown))
    elif options.command == "diff":
        differences = compare_checkpoints(find_newest(path), find_newest(Path(options.other)))
        print(to_json(differences) if options.json else difference_text(differences))
        if not differences.same:
            sys.exit(EXIT_DIFFERENT)
    else:
        print(consolidate(find_newest(path), Path(options.out), options.force))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with the subcommands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoint", description="Inspect the checkpoints of a run.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (summary, metavar, path_help) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        command.add_argument("path", metavar=metavar, help=path_help)
        if name == "diff":
            command.add_argument(
                "other", metavar="OTHER", help="the checkpoint or run to compare with, saved on any mesh"
            )
        if name != "consolidate":
            command.add_argument(
                "--json", action="store_true", help="print one JSON document instead of text"
            )
    command = commands.choices["consolidate"]
    command.add_argument(
        "out",
        metavar="OUT",
        help="the file to write; without the suffix .safetensors, a folder for model.safetensors. It "
        "contains float32 tensors under the model's parameter names, a tied weight once",
    )
    command.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return parser


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


def consolidate(checkpoint: Path, out: Path, force: bool) -> Path:
    """Write the full model in float32 into one safetensors file, which appears by one rename; return its
    path.

    Without the suffix .safetensors, `out` is a folder. Raises CheckpointError, also if the file exists and
    not `force`.
    """
    target = out if out.suffix == ".safetensors" and not out.is_dir() else out / "model.safetensors"
    if target.exists() and not force:
        raise CheckpointError(f"{target} exists: name another file, or add --force to replace it")
    weights = {name: tensor.to(torch.float32) for name, tensor in load_full_weights(checkpoint).items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            write_weights(partial, weights)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target} ({error}): name another path") from None
    return target


def _list_text(path: Path, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return f"{path}: no committed checkpoint"
    cells = []
    for row in rows:
        saved = ("?" if row[key] is None else str(row[key]) for key in ("step", "samples", "processes"))
        cells.append((*saved, f"{row['size_bytes'] / GIB:.3f}", _age(row["age_s"]), str(row["path"])))
    table = format_table(("step", "samples", "processes", "size GiB", "age", "path"), cells)
    return "\n".join([table, *(row["problem"] for row in rows if "problem" in row)])


def _verify_text(verified: dict[str, Any]) -> str:
    rate = verified["size_bytes"] / 1e9 / max(verified["seconds"], 1e-9)
    lines = [f"{path}: every byte matches the manifest" for path in verified["verified"]]
    return "\n".join(
        [*lines, f"{verified['size_bytes'] / GIB:.3f} GiB in {verified['seconds']:.1f} s, {rate:.2f} GB/s"]
    )


def _show_text(shown: dict[str, Any]) -> str:
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


_Opened = tuple[CheckpointManifest, TensorFiles]


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs: shape and dtype in the first (`here`) and the second checkpoint (`there`), or
    "missing"; and the largest absolute difference of a value if shape and dtype are the same."""

    name: str
    here: str
    there: str
    largest: float | None


@dataclass(frozen=True)
class Differences:
    """All differences between two checkpoints. `position`: keys with both values; `config`: lines of a
    unified diff; `compared`: number of tensors compared."""

    position: Mapping[str, tuple[object, object]]
    config: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    compared: int
    same: bool


def compare_checkpoints(first: Path, second: Path) -> Differences:
    """Verify and compare two checkpoints, with one pair of tensors in memory at a time. The number of
    processes and the random state are not compared. Raises CheckpointError."""
    manifest_1, manifest_2 = verify_alone(first), verify_alone(second)
    position = {
        key: (value, getattr(manifest_2.position, key))
        for key, value in vars(manifest_1.position).items()
        if value != getattr(manifest_2.position, key) and key != "world_size"
    }
    names = [name for name in {**manifest_1.tensors, **manifest_2.tensors} if not name.startswith(RANDOM)]
    opened = [
        (manifest, open_checkpoint(checkpoint, manifest))
        for checkpoint, manifest in ((first, manifest_1), (second, manifest_2))
    ]
    tensors = tuple(difference for name in names if (difference := _compare(name, *opened)))
    config = tuple(
        difflib.unified_diff(_lines(first), _lines(second), "config.yaml", "config.yaml", lineterm="", n=0)
    )
    return Differences(position, config, tensors, len(names), not (position or config or tensors))


def difference_text(differences: Differences) -> str:
    """Format the differences: the position, the config's lines, and the first 40 tensors that differ."""
    lines = [f"{key}: {value_1} | {value_2}" for key, (value_1, value_2) in differences.position.items()]
    lines += [line for line in differences.config if line[:1] in "+-" and not line.startswith(("+++", "---"))]
    rows = [
        (t.name, t.here, t.there, "" if t.largest is None else f"{t.largest:.3g}")
        for t in differences.tensors
    ]
    if not rows:
        return "\n".join([*lines, f"all {differences.compared} tensors are equal"])
    table = format_table(("tensor", "here", "there", "largest difference"), rows[:40])
    return "\n".join([*lines, table, f"{len(rows)} of {differences.compared} tensors differ"])


def _compare(name: str, first: _Opened, second: _Opened) -> TensorDifference | None:
    saved_1, saved_2 = first[0].tensors.get(name), second[0].tensors.get(name)
    if saved_1 is None or saved_2 is None or saved_1 != saved_2:
        return TensorDifference(name, str(saved_1 or "missing"), str(saved_2 or "missing"), None)
    a, b = (read_full_tensors(files, manifest, [name])[name] for manifest, files in (first, second))
    if torch.equal(a, b):
        return None
    return TensorDifference(name, str(saved_1), str(saved_2), (a.double() - b.double()).abs().max().item())


def _lines(checkpoint: Path) -> list[str]:
    path = checkpoint / "config.yaml"
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


if __name__ == "__main__":
    run_tool(main)
