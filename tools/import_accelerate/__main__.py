"""`python -m tools.import_accelerate FSDP.yaml`: convert an accelerate config to a config of this trainer.

The YAML is on stdout, the report on stderr: every accelerate key is mapped, dropped with the reason, or
refused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.parallel.yaml_io import YamlError, load_mapping
from meshwright.tools.cli import run_tool, to_json
from meshwright.tools.import_accelerate.config_file import judge_accelerate
from meshwright.tools.import_accelerate.convert import Imported, as_text, as_yaml, make_imported
from meshwright.train.errors import ConfigError

EPILOG = """examples:
  python -m tools.import_accelerate FSDP.yaml > my.yaml            FSDP.yaml: the file of `accelerate config`

Such files do not contain the model and the data: put a config that does before this one, as in
  torchrun --nproc-per-node 8 -m train.main --config llama_8b --config my.yaml
"""
NO_TORCHTITAN = (
    "{}: torchtitan settings are no longer read: write a config that extends one in configs/, such as "
    "llama_8b, and sets the degrees parallel.dp_replicate, parallel.dp_shard and parallel.tp"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert the file and print the result. Raises ConfigError."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument.partition("=")[0] == "--flags" for argument in arguments):
        raise ConfigError(NO_TORCHTITAN.format("--flags"))
    options = make_parser().parse_args(arguments)
    imported = read_accelerate(options.file)
    if options.json:
        print(to_json(imported))
        return
    print(as_yaml(imported), end="")
    print(as_text(imported), file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.import_accelerate",
        description="Convert an accelerate FSDP config to a config of this trainer. Every key is mapped, "
        "dropped with the reason, or refused; the report is on stderr.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="accelerate's YAML")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document: config, items, launch, notes"
    )
    return parser


def read_accelerate(file: str) -> Imported:
    """Read and convert an accelerate file. Raises ConfigError."""
    if file.endswith(".toml"):
        raise ConfigError(NO_TORCHTITAN.format(file))
    try:
        mapping = load_mapping(Path(file))
    except YamlError as error:
        raise ConfigError(str(error)) from None
    if not mapping:
        raise ConfigError(f"{file}: the file is empty; expected the YAML that `accelerate config` writes")
    return make_imported(file, judge_accelerate(mapping))


if __name__ == "__main__":
    run_tool(main)
