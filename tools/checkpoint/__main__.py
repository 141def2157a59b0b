"""`python -m tools.checkpoint`: lists, verifies, shows, compares, imports and exports checkpoints."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.tools.checkpoint import contents
from meshwright.tools.cli import new_parser, number_from, run_tool, to_json
from meshwright.train.checkpoint.commit import checkpoints_folder, find_newest, list_checkpoints
from meshwright.train.checkpoint.training_record import describe_training, read_training
from meshwright.train.errors import CheckpointError
from meshwright.train.files import user_path

EXIT_DIFFERENT = 1  # as diff(1)
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
EXAMPLES = """examples:
    python -m tools.checkpoint ls runs/mine
    python -m tools.checkpoint verify runs/mine                   # every byte; exit code 0 only if all match
    python -m tools.checkpoint show runs/mine                     # tensors and totals
    python -m tools.checkpoint diff runs/a runs/b                 # exit code 1 if anything differs
    python -m tools.checkpoint import HF_DIR start                # a checkpoint, with a config.yaml
    python -m tools.checkpoint export runs/mine HF_OUT            # for transformers' from_pretrained
    python -m tools.checkpoint export runs/mine mine.safetensors  # one file, the model's own names

Of a run, verify takes all checkpoints, the others the newest. -h after a subcommand explains its options."""
NEWEST = ("CHECKPOINT", "a checkpoint, or a run (its newest checkpoint)")
# Subcommand: metavar and help of each path.
COMMANDS = {
    "ls": (("RUN_OR_CHECKPOINTS_DIR", "a run's folder, or its checkpoints folder"),),
    "verify": (("CHECKPOINT_OR_RUN", "a checkpoint, or a run (all its checkpoints)"),),
    "show": (NEWEST,),
    "diff": (NEWEST, ("OTHER", "the checkpoint or run to compare with, saved on any mesh")),
    "import": (
        ("HF_DIR", "folder with config.json and *.safetensors of a Llama"),
        ("OUT", "the checkpoint to write, at step 0; dtypes do not change"),
    ),
    "export": (
        NEWEST,
        ("OUT", "the folder to write, in Hugging Face's form; or FILE.safetensors, with the model's names"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested subcommand. Raises CheckpointError."""
    options = make_parser().parse_args(arguments)
    path, *others = (
        user_path(getattr(options, name), name, CheckpointError) for name, _ in COMMANDS[options.command]
    )
    document: Any
    if options.command == "ls":
        rows = contents.describe_checkpoints(checkpoints_folder(path))
        document, text = {"checkpoints": rows}, contents.list_text(path, rows)
    elif options.command == "verify":
        document = contents.verify(path)
        text = contents.verify_text(document)
    elif options.command == "show" and read_training(path) and not list_checkpoints(checkpoints_folder(path)):
        text = describe_training(path)
        document = {"run": text}
    elif options.command == "show":
        document = contents.describe_checkpoint(find_newest(path))
        text = contents.show_text(document)
    elif options.command == "diff":
        from meshwright.tools.checkpoint import differences  # late: imports torch

        document = differences.compare_checkpoints(find_newest(path), find_newest(others[0]))
        text = differences.difference_text(document)
    else:
        from meshwright.tools.checkpoint import convert  # late, as above

        document = convert.describe(_convert(options, path, others[0]))
        text = convert.description_text(document)
    print(to_json(document) if options.json else text)
    if options.command == "diff" and not document["same"]:
        sys.exit(EXIT_DIFFERENT)


def _convert(options: argparse.Namespace, source: Path, out: Path) -> Path:
    """Import or export; return what was written."""
    from meshwright.tools.checkpoint import convert

    limit_bytes = int((options.shard_gb or 5.0) * 1e9)
    if options.command == "import":
        return convert.import_model(source, out, options.force, limit_bytes)
    checkpoint = convert.find_exported(source)
    if out.suffix in (".pt", ".pth", ".bin"):
        raise CheckpointError(f"OUT={out}: only safetensors are written: name FILE.safetensors, or a folder")
    if out.suffix != ".safetensors" or out.is_dir():
        return convert.export_model(checkpoint, out, options.force, limit_bytes, options.dtype)
    if options.shard_gb:
        raise CheckpointError(f"OUT={out} is one file: omit --shard_gb, or name a folder")
    return convert.export_file(checkpoint, out, options.force, options.dtype)


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("checkpoint", "|".join(COMMANDS), EXAMPLES)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="|".join(COMMANDS), prog=parser.prog, help=argparse.SUPPRESS
    )
    for name, paths in COMMANDS.items():
        command = commands.add_parser(name, allow_abbrev=False)
        for metavar, help_text in paths:
            command.add_argument(metavar, help=help_text)
        command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    for name in ("import", "export"):
        command = commands.choices[name]
        size_help = "size of a file in gigabytes (default 5); one tensor may exceed it"
        command.add_argument("--shard_gb", type=number_from(1e-9), metavar="GB", help=size_help)
        command.add_argument("--force", action="store_true", help="replace OUT and everything in it")
    dtype_help = "dtype of the floats among the weights (default: as saved)"
    command.add_argument("--dtype", choices=EXPORT_DTYPES, help=dtype_help)
    return parser


if __name__ == "__main__":
    run_tool(main)
