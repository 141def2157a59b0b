"""`python -m tools.checkpoint ls|verify|show|diff|consolidate PATH`: what checkpoints are there, what is in
them, and what differs between two, whatever meshes they were saved on."""

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
    load_whole_weights,
    read_whole,
    write_weights,
)
from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.checkpoint.huggingface import FilesReader
from meshwright.train.checkpoint.load import open_reader
from meshwright.train.checkpoint.manifest import MANIFEST, CheckpointManifest, read_manifest
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.errors import CheckpointError
from meshwright.train.files import replacing

EXIT_DIFFERENT = 1  # as of the diff command
NEWEST = ("CHECKPOINT", "a checkpoint, or a run: then its newest")
# Subcommand: what it does, and of which folder.
COMMANDS = {
    "ls": (
        "the committed checkpoints of a run",
        "RUN_OR_CHECKPOINTS_DIR",
        "a run's folder, or its checkpoints folder",
    ),
    "verify": (
        "exit code 0 only when every byte is as committed",
        "CHECKPOINT_OR_RUN",
        "a checkpoint, or a run: then all of its checkpoints",
    ),
    "show": ("tensors of a checkpoint, and totals", *NEWEST),
    "diff": ("what differs: config, tensors, values; exit code 1 if anything does", *NEWEST),
    "consolidate": ("the model alone, whole, in one safetensors file", *NEWEST),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the subcommand asked for. Raises CheckpointError."""
    options = make_parser().parse_args(arguments)
    path = Path(options.path)
    if options.command == "ls":
        rows = describe_checkpoints(checkpoints_folder(path))
        print(to_json({"checkpoints": rows}) if options.json else _list_text(path, rows))
    elif options.command == "verify":
        verified = verify(path)
        print(to_json(verified) if options.json else _verify_text(verified))
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
    """The tool's subcommands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoint", description="Look at the checkpoints of a run.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (what, place, words) in COMMANDS.items():
        command = commands.add_parser(name, help=what, allow_abbrev=False)
        command.add_argument("path", metavar=place, help=words)
        if name == "diff":
            command.add_argument("other", metavar="OTHER", help="what to compare it with, of any mesh")
        if name != "consolidate":
            command.add_argument(
                "--json", action="store_true", help="print one JSON document instead of text"
            )
    command = commands.choices["consolidate"]
    command.add_argument(
        "out",
        metavar="OUT",
        help="the file to write; without the suffix .safetensors, a folder that gets "
        "model.safetensors. Float32 tensors by the model's own parameter names, a tied weight once",
    )
    command.add_argument("--force", action="store_true", help="replace OUT if it is there")
    return parser


def describe_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Each committed checkpoint, oldest first: step, samples, processes that saved it, size in bytes, age in
    seconds.

    What an unreadable manifest would say is None, with the reason under `problem`.
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
        age_s = max(0.0, time.time() - path.lstat().st_mtime)  # of the last file that came into the folder
        rows.append({**row, "size_bytes": size, "age_s": age_s, "path": path})
    return rows


def verify(path: Path) -> dict[str, Any]:
    """Hash every byte of a checkpoint, or of all those of a run; bytes and seconds. Raises CheckpointError
    for the first that is not as it was committed, and if there is none."""
    found = [path] if (path / MANIFEST).is_file() else list_checkpoints(checkpoints_folder(path))
    if not found:
        raise CheckpointError(f"{path} holds no committed checkpoint")
    start_s = time.perf_counter()
    manifests = [verify_alone(checkpoint) for checkpoint in found]
    size_bytes = sum(file.size_bytes for manifest in manifests for file in manifest.files.values())
    return {"verified": found, "size_bytes": size_bytes, "seconds": time.perf_counter() - start_s}


def describe_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Position, tensors, totals and versions of one checkpoint, as its manifest says them. Totals are by what
    a name begins with: model, optim, random. Raises CheckpointError."""
    manifest = read_manifest(checkpoint)
    tensors: list[dict[str, Any]] = []
    totals: dict[str, dict[str, int]] = {}
    for name, saved in manifest.tensors.items():
        tensors.append({"name": name, **vars(saved), "size_bytes": saved.size_bytes})
        total = totals.setdefault(name.split(".")[0], {"tensors": 0, "elements": 0, "size_bytes": 0})
        total["tensors"] += 1
        total["elements"] += math.prod(saved.shape)
        total["size_bytes"] += saved.size_bytes
    place = {"checkpoint": checkpoint, "position": manifest.position, "code": manifest.code}
    return {**place, "tensors": tensors, "totals": totals}


def consolidate(checkpoint: Path, out: Path, force: bool) -> Path:
    """Write the whole model in float32 into one safetensors file, which appears by one rename; returns its
    path.

    `out` without the suffix .safetensors is a folder. Raises CheckpointError, also where the file exists
    without `force`.
    """
    target = out if out.suffix == ".safetensors" and not out.is_dir() else out / "model.safetensors"
    if target.exists() and not force:
        raise CheckpointError(f"{target} exists: name another file, or add --force to replace it")
    weights = {name: tensor.to(torch.float32) for name, tensor in load_whole_weights(checkpoint).items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            write_weights(partial, weights)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target} ({error}): name another place") from None
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
    lines = [f"{path}: every byte is as committed" for path in verified["verified"]]
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
    place = shown["position"]
    saved_by = f"step {place.step}, {place.samples} samples, saved by {place.world_size} processes"
    return f"{shown['checkpoint']}: {saved_by}\n\n{tensors}\n\n{totals}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


RANDOM = "random."  # states of the processes that saved, which say nothing of the model
_Opened = tuple[Path, CheckpointManifest, FilesReader]


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in both: what each has, and the largest absolute difference of a value
    where shape and dtype are alike."""

    name: str
    here: str
    there: str
    largest: float | None


@dataclass(frozen=True)
class Differences:
    """All differences between two checkpoints. `position`: keys with both values; `config`: lines of a
    diff."""

    position: Mapping[str, tuple[object, object]]
    config: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    compared: int
    same: bool


def compare_checkpoints(one: Path, other: Path) -> Differences:
    """Compare two checkpoints, of which every byte is verified first; in memory is one pair of tensors at a
    time. The number of processes and the random state are not compared. Raises CheckpointError."""
    here, there = verify_alone(one), verify_alone(other)
    position = {
        key: (value, getattr(there.position, key))
        for key, value in vars(here.position).items()
        if value != getattr(there.position, key) and key != "world_size"
    }
    names = [name for name in {**here.tensors, **there.tensors} if not name.startswith(RANDOM)]
    opened = [
        (checkpoint, manifest, open_reader(checkpoint, manifest))
        for checkpoint, manifest in ((one, here), (other, there))
    ]
    found = tuple(each for name in names if (each := _compare(name, *opened)))
    config = tuple(
        difflib.unified_diff(_lines(one), _lines(other), "config.yaml", "config.yaml", lineterm="", n=0)
    )
    return Differences(position, config, found, len(names), not (position or config or found))


def difference_text(differences: Differences) -> str:
    """For people: the position, the config's lines, and the tensors that differ, the first 40 of them."""
    lines = [f"{key}: {here} | {there}" for key, (here, there) in differences.position.items()]
    lines += [line for line in differences.config if line[:1] in "+-" and not line.startswith(("+++", "---"))]
    rows = [
        (t.name, t.here, t.there, "" if t.largest is None else f"{t.largest:.3g}")
        for t in differences.tensors
    ]
    if not rows:
        return "\n".join([*lines, f"all {differences.compared} tensors are equal"])
    table = format_table(("tensor", "here", "there", "largest difference"), rows[:40])
    return "\n".join([*lines, table, f"{len(rows)} of {differences.compared} tensors differ"])


def _compare(name: str, one: _Opened, other: _Opened) -> TensorDifference | None:
    here, there = one[1].tensors.get(name), other[1].tensors.get(name)
    if here is None or there is None or here != there:
        return TensorDifference(name, str(here or "missing"), str(there or "missing"), None)
    a, b = (
        read_whole(checkpoint, manifest, [name], reader)[name]
        for checkpoint, manifest, reader in (one, other)
    )
    if torch.equal(a, b):
        return None
    return TensorDifference(name, str(here), str(there), (a.double() - b.double()).abs().max().item())


def _lines(checkpoint: Path) -> list[str]:
    path = checkpoint / "config.yaml"
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


if __name__ == "__main__":
    run_tool(main)
