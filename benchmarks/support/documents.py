"""What commands print, in the pages that show it: every block of OUTPUTS is made again, line by line."""

import contextlib
import difflib
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.tools.plan.__main__ import main
from meshwright.tools.processes import BenchError

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- written by `python -m benchmarks.scaling --write` -->", "<!-- end of what it writes -->"
AUTO = ("--gpu", "h100-sxm", "--parallel.plan=auto")
BEST_70B = ("--config", "llama_70b.yaml", "--gpus", "256", *AUTO, "--tokens", "1e12", "--price", "2")
SCALING_8B = ("--config", "llama_8b.yaml", *AUTO, "--sweep", "gpus=8..32")
# page -> the first lines of its blocks, and the commands of tools.plan that print them
OUTPUTS: Mapping[Path, Mapping[str, Sequence[str]]] = {
    ROOT / "README.md": {"why:": BEST_70B},
    ROOT / "docs" / "planner.md": {"mesh:": BEST_70B, "GPUs  tp": SCALING_8B},
}
LEAST_ALIKE = 0.6  # of a line and the one that replaces it, without numbers


def printed(arguments: Sequence[str]) -> list[str]:
    """Return the lines that tools.plan prints, those that it broke as one: tables have two spaces inside."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main(arguments)
    return re.sub(r"\n {2}(?=\S)(?!.* {2})", " ", text.getvalue()).splitlines()


def refresh_outputs() -> None:
    """Make the blocks of all pages again."""
    for page, blocks in OUTPUTS.items():
        text = page.read_text(encoding="utf-8")
        for first, arguments in blocks.items():
            block = block_of(text, first)
            text = text.replace(block, refreshed(block, printed(arguments)))
        page.write_text(text, encoding="utf-8")


def block_of(text: str, first: str) -> str:
    """Return the text of the block that begins with `first`."""
    found = re.search(rf"^```\n({re.escape(first)}.*?)\n```$", text, re.DOTALL | re.MULTILINE)
    if not found:
        raise BenchError(f"no block begins with {first!r}: change OUTPUTS in benchmarks/support/documents.py")
    return found[1]


def refreshed(block: str, lines: Sequence[str]) -> str:
    """Return the block with each of its lines as it is printed now, and ... as it is. Lines that a page
    breaks go on with two spaces. Raises BenchError for a line of which nothing alike is printed."""
    width = max(map(len, block.splitlines()))
    shown = []
    for item in re.split(r"\n(?! {2}\S)", block):
        whole = " ".join(line.strip() for line in item.splitlines())
        new = whole if whole == "..." else _most_alike(whole if "\n" in item else item, lines)
        is_text = new.startswith("- ")
        shown += textwrap.wrap(new, max(width, 80), subsequent_indent="  ") if is_text else [new]
    return "\n".join(shown)


def _most_alike(line: str, lines: Sequence[str]) -> str:
    """Return the line of `lines` that is most like `line`, of those with the same first word if there are."""

    def alike(other: str) -> tuple[bool, float]:
        same_word = line.split()[:1] == other.split()[:1] and line[:1] != "-"
        mine, others = (re.sub(r"[\d.,]+", "#", text) for text in (line, other))
        return same_word, difflib.SequenceMatcher(None, mine, others, autojunk=False).ratio()

    best = max(lines, key=alike)
    if alike(best)[1] < LEAST_ALIKE:
        raise BenchError(f"nothing like this line is printed now: change the page by hand: {line}")
    return best


def replace_part(page: Path, part: str) -> None:
    """Write what stands between the marks of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{part}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
