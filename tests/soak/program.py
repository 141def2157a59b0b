"""The common part of the programs of this folder, which run for minutes or hours and are started by hand.

    python -m tests.soak.kills      kill -9 of random ranks at random moments, and what is lost
    python -m tests.soak.safety     the cost of verified checkpoints
    python -m tests.soak.faults     known faults put into the product, and the tests that detect them

Each describes itself with -h. `--record` of the first two writes date, hardware, versions, command, config
and raw figures to tests/soak/records.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.harness import make_document, write_record
from meshwright.tools.cli import run_tool

RECORDS = Path(__file__).parent / "records"

# the config of the runs, the figures, and the figures as text
Measured = tuple[dict[str, Any], dict[str, Any], str]


def make_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all programs have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.soak.{name}", description=description, epilog=epilog, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document: what --record writes")
    parser.add_argument(
        "--record",
        nargs="?",
        const=name,
        metavar="NAME",
        help=f"write tests/soak/records/DATE-NAME.json (NAME: {name} if not given)",
    )
    return parser


def run_program(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, Sequence[str]], Measured],
) -> None:
    """Parse the command line, measure, print and record; a user error is one message."""

    def main() -> None:
        options, overrides = parser.parse_known_args()
        config, figures, text = measure(options, overrides)
        document = make_document(f"tests.soak.{name}", sys.argv[1:], config, figures)
        print(json.dumps(document, indent=2) if options.json else text)
        if options.record:
            print(
                f"recorded: tests/soak/records/{write_record(document, options.record, RECORDS).name}",
                file=sys.stderr,
            )

    run_tool(main)
