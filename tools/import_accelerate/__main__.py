"""`python -m tools.import_accelerate FSDP.yaml`: an accelerate config as a config of ours.

YAML on stdout (or in the file of --out), the report on stderr: every key of theirs mapped, dropped with the
reason, or refused.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.parallel.yaml_io import YamlError, load_mapping
from meshwright.tools.cli import run_tool
from meshwright.tools.import_accelerate.convert import Imported, as_document, as_text, as_yaml, make_imported
from meshwright.tools.import_accelerate.table import judge_accelerate
from meshwright.train.errors import ConfigError
from meshwright.train.files import write_whole

EPILOG = """examples:
  python -m tools.import_accelerate FSDP.yaml > my.yaml            what `accelerate config` wrote
  python -m tools.import_accelerate FSDP.yaml --out my.yaml        the same; the launch line names my.yaml

The model and the data are not in such files: launch with a config that has them before this one, as in
  torchrun --nproc-per-node 8 -m train.main --config llama_8b --config my.yaml
"""
NO_TORCHTITAN = (
    "{}: torchtitan's settings are no longer read: write a config of your own, with its degrees as "
    "parallel.dp_replicate, parallel.dp_shard and parallel.tp, over a shape in configs/, such as llama_8b"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Import, and print or write the result. Raises ConfigError."""
    words = sys.argv[1:] if arguments is None else arguments
    if any(word.partition("=")[0] == "--flags" for word in words):
        raise ConfigError(NO_TORCHTITAN.format("--flags"))
    options = make_parser().parse_args(words)
    out = Path(options.out) if options.out else None
    if out:
        check_out(out, options.force)
    imported = read_accelerate(options.file, str(out or "CONFIG.yaml"))
    if out:
        write_config(out, as_yaml(imported))
    if options.json:
        print(json.dumps(as_document(imported), indent=2, default=str))
        return
    if not out:
        print(as_yaml(imported), end="")
    print(as_text(imported), file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """The tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.import_accelerate",
        description="A config of ours from an accelerate FSDP config. Every key is mapped, dropped with the "
        "reason, or refused; the report is on stderr.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="accelerate's YAML")
    parser.add_argument(
        "--out", metavar="CONFIG.yaml", help="write the config into this file instead of printing it"
    )
    parser.add_argument("--force", action="store_true", help="let --out replace a file that is there")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document: config, mapped, dropped, notes, launch"
    )
    return parser


def read_accelerate(file: str, config_name: str) -> Imported:
    """What an accelerate file becomes; the launch line calls the result `config_name`. Raises ConfigError."""
    if file.endswith(".toml"):
        raise ConfigError(NO_TORCHTITAN.format(file))
    try:
        mapping = load_mapping(Path(file))
    except YamlError as error:
        raise ConfigError(str(error)) from None
    if not mapping:
        raise ConfigError(f"{file}: the file is empty. It should be what `accelerate config` writes")
    return make_imported(file, judge_accelerate(mapping), config_name)


def check_out(path: Path, force: bool) -> None:
    """Raises ConfigError if the config cannot be written there, before anything is read."""
    if path.is_dir():
        raise ConfigError(f"--out={path} is a folder: name a file")
    if path.exists() and not force:
        raise ConfigError(f"--out={path} is there already: take another name, or add --force to replace it")


def write_config(path: Path, text: str) -> None:
    """Write the config as a whole or not at all. Raises ConfigError."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"--out={path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    run_tool(main)
