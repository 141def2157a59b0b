"""What the programs of this folder have in common: they run for minutes or hours, and are started by hand.

    python -m tests.soak.kills      kill -9 of random ranks at random moments, and what is lost
    python -m tests.soak.safety     what verified checkpoints cost
    python -m tests.soak.faults     known faults put into the product, and which test notices

Each says with -h what it does. `--record` of the first two leaves date, hardware, versions, command, config
and raw figures in tests/soak/records.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.tools.bench.harness import make_document, write_record
from meshwright.tools.cli import run_tool

RECORDS = Path(__file__).parent / "records"

# the config of its runs, the figures, and a text of them for people
Measured = tuple[dict[str, Any], dict[str, Any], str]


def make_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser with the options that all have."""
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
    """Parse the command line, measure, print and record; what the user did wrong is one message."""

    def main() -> None:
        options, overrides = parser.parse_known_args()
        config, figures, text = measure(options, overrides)
        document = make_document(name, sys.argv[1:], config, figures)
        document["command"][2] = f"tests.soak.{name}"
        print(json.dumps(document, indent=2) if options.json else text)
        if options.record:
            print(
                f"recorded: tests/soak/records/{write_record(document, options.record, RECORDS).name}",
                file=sys.stderr,
            )

    run_tool(main)
