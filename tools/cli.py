"""What every tool's command line has in common: how it ends, and how it prints tables and JSON."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence

from meshwright.train.errors import USER_ERRORS

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # what a shell reports for Ctrl-C


def run_tool(main: Callable[[], None]) -> None:
    """Run a tool; what the user did wrong becomes one message on stderr and exit code 2, without a
    traceback."""
    try:
        main()
        sys.stdout.flush()
    except USER_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever reads our output, such as head, has seen enough
        # Python's own last flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def to_json(document: object) -> str:
    """Of a tool's --json: records are mappings by the names of their fields; what is not finite is null."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2).decode()


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart, under their headings."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )
    return "\n".join(lines)


def positive(text: str) -> int:
    """Type of an option that counts something: 1 or more."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Type of an option that may be 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least {least}")
    return int(text)


def number_from(least: float, below: float = math.inf) -> Callable[[str], float]:
    """Type of an option that is a finite number, from `least` on and less than `below`."""

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
