"""What commands print, in the pages that show it: every block of OUTPUTS and EXAMPLES is made again, line by
line, also by `python -m benchmarks.support.documents`."""

import contextlib
import difflib
import io
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
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
# page -> the first words of its blocks, and what Python runs, in a folder with the page's own programs
CHECK = ("-m", "tools.check", "--model.factory=mine:build")
EXAMPLES: Mapping[Path, Mapping[str, Sequence[str]]] = {
    ROOT / "README.md": {
        "mesh:": (*CHECK, "--dp_shard=2", "--tp=2"),
        "79 tensors": (*CHECK, "--sharded=mine:shard", "--dp_shard=1", "--tp=2"),
    },
}
ROUNDING = re.compile(r"\d\.\de-0[5-9]")  # a difference of two runs, which every run has another of
PROGRAM = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LEAST_ALIKE = 0.6  # of a line and the one that replaces it, without numbers


def printed(arguments: Sequence[str]) -> list[str]:
    """Return the lines that tools.plan prints, those that it broke as one: tables have two spaces inside."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main(arguments)
    return re.sub(r"\n {2}(?=\S)(?!.* {2})", " ", text.getvalue()).splitlines()


def printed_by_example(page: Path, command: Sequence[str]) -> list[str]:
    """Return the lines that a command of EXAMPLES prints. A page's programs are its blocks of Python that
    begin with their file's name. Raises BenchError if the command fails; exit code 1 is a check's finding."""
    with tempfile.TemporaryDirectory() as folder:
        for name, program in PROGRAM.findall(page.read_text(encoding="utf-8")):
            (Path(folder) / name).write_text(program, encoding="utf-8")
        for name in ("tools", "meshwright"):
            (Path(folder) / name).symlink_to(ROOT / name)
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
        )
    if done.returncode not in (0, 1) or not done.stdout:
        raise BenchError(f"python {' '.join(command)}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()


def refresh_outputs() -> None:
    """Make the blocks of all pages again."""
    for page in OUTPUTS:
        text = page.read_text(encoding="utf-8")
        for block, today in (*predictions_of_today(page), *examples_of_today(page)):
            text = text.replace(block, today)
        page.write_text(text, encoding="utf-8")


def predictions_of_today(page: Path) -> Iterator[tuple[str, str]]:
    """Yield each block of OUTPUTS on a page, and what it should be."""
    text = page.read_text(encoding="utf-8")
    for first, arguments in OUTPUTS[page].items():
        block = block_of(text, first)
        yield block, refreshed(block, printed(arguments))


def examples_of_today(page: Path) -> Iterator[tuple[str, str]]:
    """Yield each block of EXAMPLES on a page, and what it should be."""
    text = page.read_text(encoding="utf-8")
    for first, command in EXAMPLES.get(page, {}).items():
        block = block_of(text, first)
        yield block, refreshed(block, printed_by_example(page, command), breaks=False)


def block_of(text: str, first: str) -> str:
    """Return the text of the block that begins with `first`."""
    found = re.search(rf"^```\n({re.escape(first)}.*?)\n```$", text, re.DOTALL | re.MULTILINE)
    if not found:
        raise BenchError(f"no block begins with {first!r}: change OUTPUTS in benchmarks/support/documents.py")
    return found[1]


def refreshed(block: str, lines: Sequence[str], breaks: bool = True) -> str:
    """Return the block with each of its lines as it is printed now, and ... as it is. Lines that the page
    breaks, if it does, go on with two spaces. Raises BenchError if nothing like a line is printed."""
    width = max(map(len, block.splitlines()))
    shown = []
    for item in re.split(r"\n(?! {2}\S)" if breaks else r"\n", block):
        whole = " ".join(line.strip() for line in item.splitlines())
        new = whole if whole == "..." else _most_alike(whole if "\n" in item else item, lines)
        if ROUNDING.sub("", new) == ROUNDING.sub("", item):
            new = item
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


if __name__ == "__main__":
    refresh_outputs()
