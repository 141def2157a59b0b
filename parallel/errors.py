"""The error of a plan that cannot be, and messages of bounded length about what others wrote."""

from collections.abc import Sequence

LETTERS = 900  # of a message, file names included


def one_line(message: object, letters: int = LETTERS) -> str:
    """The message on one line: line ends become spaces, letters that cannot be shown become ?, and of a long
    one the middle is left out."""
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(message).split()))
    return line if len(line) <= letters else f"{line[: letters // 2]} ... {line[-(letters // 2) + 5 :]}"


def first_of(items: Sequence[object], separator: str = ", ", most: int = 3) -> str:
    """The first items in words, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def each_line(message: str) -> str:
    """The message with each of its lines as by `one_line`, indented as before."""
    return "\n".join(
        f"{' ' * min(8, len(line) - len(line.lstrip(' ')))}{one_line(line)}" for line in message.split("\n")
    )


class PlanError(ValueError):
    """The parallelisation asked for cannot be: each line of the message names rule, value, place and way
    out."""

    def __init__(self, message: str) -> None:
        super().__init__(each_line(message))
