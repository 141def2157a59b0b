"""`python -m tools.checkpoint ls|show|consolidate PATH`: what checkpoints are there, what is in one, and one file of it."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tools.command import format_table, run_tool
from tools.whole_weights import checkpoints_folder, find_newest, load_whole_weights, read_saved_tensors
from train.checkpoint import CheckpointError, list_checkpoints, read_position

GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the subcommand asked for. Raises CheckpointError."""
    options = make_parser().parse_args(arguments)
    path = Path(options.path)
    if options.command == "ls":
        rows = describe_checkpoints(checkpoints_folder(path))
        print(json.dumps({"checkpoints": rows}, indent=2) if options.json else _list_text(path, rows))
    elif options.command == "show":
        shown = describe_checkpoint(find_newest(path))
        print(json.dumps(shown, indent=2) if options.json else _show_text(shown))
    else:
        written = consolidate(find_newest(path), Path(options.out), options.force)
        print(f"{written}: {written.stat().st_size / GIB:.3f} GiB")


def make_parser() -> argparse.ArgumentParser:
    """The tool's subcommands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoint",
        description="Look at checkpoints, and make one file of a sharded one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="subcommands and their options:\n"
        "  ls RUN_OR_CHECKPOINTS_DIR [--json]          the complete checkpoints of a run\n"
        "  show CHECKPOINT [--json]                    tensors of a checkpoint, and totals\n"
        "  consolidate CHECKPOINT OUT [--force]        the model alone, whole, in one safetensors file\n"
        "\nA run's folder in place of CHECKPOINT means its newest one.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="ls|show|consolidate")
    ls = commands.add_parser("ls", help="the complete checkpoints of a run", allow_abbrev=False)
    ls.add_argument("path", metavar="RUN_OR_CHECKPOINTS_DIR", help="a run's folder, or its checkpoints folder")
    show = commands.add_parser("show", help="tensors of a checkpoint, and totals", allow_abbrev=False)
    show.add_argument("path", metavar="CHECKPOINT", help="a checkpoint, or a run: then its newest")
    for command in (ls, show):
        command.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    one = commands.add_parser("consolidate", help="the model alone, whole, in one safetensors file", allow_abbrev=False)
    one.add_argument("path", metavar="CHECKPOINT", help="a checkpoint, or a run: then its newest")
    one.add_argument("out", metavar="OUT", help="the file to write; without the suffix .safetensors, a folder that gets "
                     "model.safetensors. Float32 tensors by the model's own parameter names, a tied weight once")  # fmt: skip
    one.add_argument("--force", action="store_true", help="replace OUT if it is there")
    return parser


def describe_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Each complete checkpoint, oldest first: step, samples, processes that saved it, size in bytes, age in seconds.

    What an unreadable state.json would say is None, with the reason under `problem`.
    """
    rows = []
    for path in list_checkpoints(folder):
        row: dict[str, Any] = {"step": int(path.name.removeprefix("step-")), "samples": None, "processes": None}
        try:
            position = read_position(path)
            row |= {"samples": position.samples, "processes": position.world_size}
        except CheckpointError as error:
            row["problem"] = str(error)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        age_s = max(0.0, time.time() - (path / "state.json").stat().st_mtime)
        rows.append({**row, "size_bytes": size, "age_s": age_s, "path": str(path)})
    return rows


def describe_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Position, tensors and totals of one checkpoint, as plain data. Totals are by what a name begins with: model,
    optim, random. Raises CheckpointError."""
    saved = read_saved_tensors(checkpoint)
    tensors: list[dict[str, Any]] = []
    totals: dict[str, dict[str, int]] = {}
    for name, t in saved.items():
        tensors.append(
            {"name": name, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "size_bytes": t.size_bytes}
        )
        total = totals.setdefault(name.split(".")[0], {"tensors": 0, "elements": 0, "size_bytes": 0})
        total["tensors"] += 1
        total["elements"] += t.elements
        total["size_bytes"] += t.size_bytes
    return {"checkpoint": str(checkpoint), "position": asdict(read_position(checkpoint)), "tensors": tensors, "totals": totals}


def consolidate(checkpoint: Path, out: Path, force: bool) -> Path:
    """Write the whole model in float32 into one safetensors file, which appears by one rename; returns its path.

    `out` without the suffix .safetensors is a folder. Raises CheckpointError, also where the file exists without `force`.
    """
    target = out if out.suffix == ".safetensors" and not out.is_dir() else out / "model.safetensors"
    if target.exists() and not force:
        raise CheckpointError(f"{target} exists: name another file, or add --force to replace it")
    weights = {name: tensor.to(torch.float32) for name, tensor in load_whole_weights(checkpoint).items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(weights, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target} ({error}): name another place") from None
    return target


def _write_whole(weights: dict[str, Tensor], target: Path) -> None:
    """Write beside `target`, then rename: what is there under its name is always a whole file."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode  # as the user's umask has it; safetensors would leave the file to its owner alone
        save_file(weights, partial, metadata={"format": "pt"})
        partial.chmod(mode)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _list_text(path: Path, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return f"{path}: no complete checkpoint"
    head = ("step", "samples", "processes", "size GiB", "age", "path")
    return format_table(head, [(str(row["step"]), _or_unknown(row["samples"]), _or_unknown(row["processes"]),
                                f"{row['size_bytes'] / GIB:.3f}", _age(row["age_s"]), row["path"]) for row in rows])  # fmt: skip


def _show_text(shown: dict[str, Any]) -> str:
    tensors = format_table(
        ("tensor", "shape", "dtype"),
        [(t["name"], " x ".join(map(str, t["shape"])) or "scalar", t["dtype"]) for t in shown["tensors"]],
    )
    totals = format_table(
        ("total of", "tensors", "elements", "GiB"),
        [(kind, str(t["tensors"]), f"{t['elements']:,}", f"{t['size_bytes'] / GIB:.3f}") for kind, t in shown["totals"].items()],
    )
    place = shown["position"]
    saved_by = f"step {place['step']}, {place['samples']} samples, saved by {place['world_size']} processes"
    return f"{shown['checkpoint']}: {saved_by}\n\n{tensors}\n\n{totals}"


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


if __name__ == "__main__":
    run_tool(main)
