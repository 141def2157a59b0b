"""Parts of a page of the docs that are written by a measurement: between two marks that bear its name."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.train.errors import ConfigError


def marks(name: str) -> tuple[str, str]:
    """The lines before and behind the part that `tools.bench NAME` writes."""
    return f"<!-- written by tools.bench {name}: begin -->", f"<!-- written by tools.bench {name}: end -->"


def check_page(page: Path, name: str) -> None:
    """Raises ConfigError for what is no page, or has no marks."""
    if not page.is_file():
        raise ConfigError(f"--page={page}: there is no such file")
    text, (begin, end) = page.read_text(encoding="utf-8"), marks(name)
    if not 0 <= text.find(begin) < text.find(end):
        raise ConfigError(
            f"--page={page}: it must have the lines {begin} and {end}, between which the tables go"
        )


def fill_page(page: Path, name: str, part: str) -> None:
    """Write the part between its marks, in place of what was there."""
    text, (begin, end) = page.read_text(encoding="utf-8"), marks(name)
    before, after = text.partition(begin)[0], text.partition(end)[2]
    page.write_text(f"{before}{begin}\n\n{part}\n\n{end}{after}", encoding="utf-8")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown writes one."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
