"""`python -m tools.import_accelerate FSDP.yaml`: an accelerate config, or torchtitan's settings, as a config
of ours.

YAML on stdout (or in the file of --out), the report on stderr: every key of theirs mapped, dropped with the
reason, or refused.
"""

import argparse
import contextlib
import json
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import one_line
from meshwright.parallel.yaml_io import YamlError, load_mapping, read_text
from meshwright.tools.cli import run_tool
from meshwright.tools.import_accelerate.accelerate import judge_accelerate
from meshwright.tools.import_accelerate.convert import as_document, as_text, as_yaml, make_imported
from meshwright.tools.import_accelerate.rules import Item
from meshwright.tools.import_accelerate.torchtitan import judge_torchtitan, parse_flags
from meshwright.train.errors import ConfigError

EPILOG = """examples:
  python -m tools.import_accelerate FSDP.yaml > my.yaml            what `accelerate config` wrote
  python -m tools.import_accelerate TRAIN.toml --out my.yaml       torchtitan's settings (0.1 to 0.2), from their file
  python -m tools.import_accelerate --flags "--parallelism.tensor_parallel_degree=2 --compile.enable"
                                                                   torchtitan's flags; with a TOML file they win over it

The model and the data are not in such files: launch with a config that has them before the imported one, as in
  torchrun --nproc-per-node 8 -m train.main --config llama_8b --config my.yaml
"""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> None:
    """Import, and print or write the result. Raises ConfigError."""
    parser = make_parser()
    options = parser.parse_args(_join_flags(sys.argv[1:] if arguments is None else arguments))
    if options.file is None and options.flags is None:
        parser.error("a file, or --flags, is needed")
    out = Path(options.out) if options.out else None
    if out:
        check_out(out, options.force)
    source = options.file or "--flags"
    imported = make_imported(source, judge(options.file, options.flags), str(out or "CONFIG.yaml"))
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
        description="A config of ours from an accelerate FSDP config or from torchtitan's Llama settings. "
        "Every key is mapped, "
        "dropped with the reason, or refused; the report is on stderr.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="accelerate's YAML, or torchtitan's settings if it ends in .toml",
    )
    parser.add_argument(
        "--flags",
        metavar="FLAGS",
        help="torchtitan's flags, in one quoted text, instead of or beside its .toml",
    )
    parser.add_argument(
        "--out", metavar="CONFIG.yaml", help="write the config into this file instead of printing it"
    )
    parser.add_argument("--force", action="store_true", help="let --out replace a file that is there")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document: config, mapped, dropped, notes, launch"
    )
    return parser


def _join_flags(arguments: Sequence[str]) -> list[str]:
    """`--flags TEXT` as `--flags=TEXT`: argparse takes a text that starts with a dash for an option of its
    own."""
    joined: list[str] = []
    for argument in arguments:
        if joined[-1:] == ["--flags"]:
            joined[-1] = f"--flags={argument}"
        else:
            joined.append(argument)
    return joined


def judge(file: str | None, flags: str | None) -> list[Item]:
    """What becomes of every key of the file and the flags. Raises ConfigError."""
    if file is not None and not file.endswith(".toml"):
        if flags is not None:
            raise ConfigError(
                f"--flags are torchtitan's, and {file} is no .toml file of torchtitan's: leave one out"
            )
        return judge_accelerate(read_yaml(Path(file)))
    try:
        words = shlex.split(flags or "")
    except ValueError as error:
        raise ConfigError(f"--flags={flags}: {str(error).lower()}") from None
    return judge_torchtitan(read_toml(Path(file)) if file is not None else None, parse_flags(words))


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping of a YAML file, which has keys. Raises ConfigError."""
    try:
        mapping = load_mapping(path)
    except YamlError as error:
        raise ConfigError(str(error)) from None
    if not mapping:
        raise ConfigError(f"{path}: the file is empty. It should be what `accelerate config` writes")
    return mapping


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(one_line(f"{path}: {error}")) from None


def check_out(path: Path, force: bool) -> None:
    """Raises ConfigError if the config cannot be written there, before anything is read."""
    if path.is_dir():
        raise ConfigError(f"--out={path} is a folder: name a file")
    if path.exists() and not force:
        raise ConfigError(f"--out={path} is there already: take another name, or add --force to replace it")


def write_config(path: Path, text: str) -> None:
    """Write beside `path`, then rename: under its name is always a whole file. Raises ConfigError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ConfigError(f"--out={path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    run_tool(main)
