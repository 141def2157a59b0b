"""What every subcommand of the bench is: its words, its options, what it measures, and what that comes to."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

KEYS = (
    "Config keys of train.main are accepted too, as --section.key=value, and win over the shape "
    "measured here."
)


@dataclass(frozen=True)
class Result:
    """What a subcommand found: figures as data and as text; `config` of the run, or of several by name, where
    there is one."""

    config: dict[str, Any] | None
    figures: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Measurement:
    """A subcommand.

    Args:
        name: on the command line
        summary, description, epilog: of its help
        add_options: adds its options to a parser
        measure: takes them and the config keys that follow. Raises what train.config.USER_ERRORS lists
        takes_keys: whether config keys of train.main may follow
        keeps_record: it writes its record itself, case by case
    """

    name: str
    summary: str
    description: str
    epilog: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Sequence[str]], Result]
    takes_keys: bool = True
    keeps_record: bool = False


def add_measurement(subparsers: Any, measurement: Measurement) -> None:
    """Its parser, with the options that all have."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        measurement.name,
        help=measurement.summary,
        description=measurement.description,
        epilog=measurement.epilog,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document: what --record writes")
    words = f"write tools/bench/records/DATE-NAME.json (NAME: {measurement.name} if not given)"
    again = (
        ", or go on with the newest of that name: what is in it is not measured again"
        if measurement.keeps_record
        else ""
    )
    parser.add_argument("--record", nargs="?", const="", metavar="NAME", help=words + again)
    measurement.add_options(parser)
    parser.set_defaults(measurement=measurement)


def no_options(parser: argparse.ArgumentParser) -> None:
    """Of a subcommand that has none."""


def without_config(measure: Callable[..., tuple[dict[str, Any], str]]) -> Callable[..., Result]:
    """A measurement that is of no one run: figures and text."""
    return lambda options, overrides: Result(None, *measure(options, overrides))


def with_config(measure: Callable[..., tuple[dict[str, Any], dict[str, Any], str]]) -> Callable[..., Result]:
    """A measurement of runs: config, figures and text."""
    return lambda options, overrides: Result(*measure(options, overrides))
