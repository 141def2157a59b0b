"""The error for an impossible plan, and messages of bounded length that quote user input."""

import os
import traceback
from collections.abc import Sequence

LETTERS = 900  # limit for one line of a message, including file names
# starts of the names of files that are not the caller's: generated code, Python's own, and ours
LIBRARIES = ("<", os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__)))


def place_of(error: BaseException) -> str:
    """Return the last line of the caller's own code in the traceback of an error, " (FILE:LINE)", or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not (frame.filename.startswith(LIBRARIES) or "/site-packages/" in frame.filename):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def one_line(message: object, letters: int = LETTERS) -> str:
    """Return the message on one line: line ends become spaces, unprintable characters become ?, and the
    middle of a message longer than `letters` becomes "..."."""
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(message).split()))
    return line if len(line) <= letters else f"{line[: letters // 2]} ... {line[-(letters // 2) + 5 :]}"


def first_of(items: Sequence[object], separator: str = ", ", most: int = 3) -> str:
    """Return the first `most` items as text, and the number of further items."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def each_line(message: str) -> str:
    """Apply `one_line` to each line of the message, keeping up to 8 spaces of indentation."""
    return "\n".join(
        f"{' ' * min(8, len(line) - len(line.lstrip(' ')))}{one_line(line)}" for line in message.split("\n")
    )


def fold(phrases: Sequence[str], separator: str = " ", width: int = 80) -> str:
    """Join phrases into lines of at most `width` characters, broken only between phrases; later lines are
    indented. A longer phrase has a line to itself."""
    lines = [phrases[0]]
    for phrase in phrases[1:]:
        if len(lines[-1] + separator + phrase) <= width:
            lines[-1] += separator + phrase
        else:
            lines.append(f"  {phrase}")
    return "\n".join(lines)


class PlanError(ValueError):
    """The requested parallelization is impossible. A line of the message has rule, value, place and fix."""

    def __init__(self, message: str) -> None:
        super().__init__(each_line(message))
