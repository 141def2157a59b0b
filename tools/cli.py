"""Common parts of the tools' command lines: exit codes, option types, tables and JSON."""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence

from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.serialize import format_table as format_table  # the tools' too
from meshwright.train.config_keys import is_config_key
from meshwright.train.distributed.exit import escape_unencodable
from meshwright.train.errors import USER_ERRORS, ConfigError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # what a shell reports for Ctrl-C


def run_tool(main: Callable[[], None]) -> None:
    """Run a tool. One of USER_ERRORS becomes a message on stderr and exit code 2, without a traceback.
    SIGTERM, as of a CI's timeout, ends what the tool has started, as Ctrl-C does."""
    escape_unencodable()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        main()
        sys.stdout.flush()
    except USER_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, such as head, has exited
        # Python's own flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def new_parser(tool: str, arguments: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return the parser of a tool: its help has its arguments, then `description` and `epilog` as written."""
    command = f"python -m tools.{tool}"
    return argparse.ArgumentParser(
        prog=command,
        usage=" ".join(filter(None, [command, arguments, "[OPTION ...]"])),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add --config, the files of `parse_with_keys`."""
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="X",
        help="YAML file: a path, or a name in configs/, such as llama_8b.yaml; later ones override",
    )


def add_node_option(parser: argparse.ArgumentParser) -> None:
    text = "processes per node, one per GPU (default 8, at most all), on which strategies depend"
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help=text)


def parse_with_keys(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Return a tool's own options, and the arguments of `parse_config`: the files of its --config, if it has
    that option, then config keys. Raises ConfigError for an option that is neither, and if no --config and no
    key says which model it is."""
    options, keys = parser.parse_known_args(arguments)
    known = [name for action in parser._actions for name in action.option_strings]
    for name in (key.partition("=")[0] for key in keys if key.startswith("--")):
        if not ("." in name or is_config_key(name[2:]) or name in ("--config", "--print_config")):
            hint = nearest(name, known) or f" See {parser.prog} -h for all options."
            raise ConfigError(f"unknown option {name}.{hint}")
    if "config" not in options:
        return options, keys
    if not options.config and not any(key.startswith("--model.factory") for key in keys):
        raise ConfigError(
            "--config X is missing, or --model.factory=MODULE:FUNCTION for a model of yours. "
            f"See {parser.prog} -h"
        )
    return options, [*(f"--config={name}" for name in options.config), *keys]


def to_json(document: object) -> str:
    """Return the text of a tool's --json: dataclasses as objects, numbers that are not finite as null."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2).decode()


def _integer_from(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be an integer of at least {least}")
        return int(text)

    return read


positive, natural = _integer_from(1), _integer_from(0)  # option types


def number_from(least: float, below: float = math.inf) -> Callable[[str], float]:
    """Return an option type: a finite number of at least `least` and less than `below`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < below:
            limit = "" if below == math.inf else f" and less than {below:g}"
            raise argparse.ArgumentTypeError(f"{text} must be a number of at least {least:g}{limit}")
        return value

    return read
