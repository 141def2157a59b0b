"""Measures how much of the project a run executes: files with an executed function, and lines of those
functions.

    torchrun --nproc-per-node 4 -m tests.support.workers.executed_code --config llama_debug.yaml \
        --parallel.tp=2 --train.steps=3 --run.dir=/tmp/executed

Takes the arguments of meshwright.train.main, and counts on rank 0. Code that runs during an import is not
counted, nor code that only the compiler sees: compiled blocks are counted in their first call.
"""

import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("models", "parallel", "train", "tools")

_code = set[CodeType]()
_foreign = set[CodeType]()


def watch(frame: FrameType, event: str, argument: Any) -> None:
    """A profile function (sys.setprofile) that records each called function of the project."""
    code = frame.f_code
    if event != "call" or code in _code or code in _foreign:
        return
    if code.co_name == "<module>" or not project_file(code.co_filename):
        _foreign.add(code)
    elif not _importing(frame):
        _code.add(code)


def project_file(name: str) -> str:
    """The file's path relative to the project's root, with links resolved; "" for other files."""
    path = Path(os.path.realpath(name))
    inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS
    return path.relative_to(ROOT).as_posix() if inside else ""


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def summary(executed: Iterable[CodeType]) -> str:
    """The table: folders with their files and lines, and the sum."""
    lines = dict[str, set[int]]()
    for code in executed:
        numbers = [line for *_, line in code.co_lines() if line]
        lines.setdefault(project_file(code.co_filename), set()).update(
            range(code.co_firstlineno, max(numbers, default=code.co_firstlineno) + 1)
        )
    rows = list[str]()
    for folder in sorted({str(Path(name).parent) for name in lines}):
        files = [name for name in lines if str(Path(name).parent) == folder]
        names = " ".join(f"{Path(name).stem} {len(lines[name])}" for name in sorted(files))
        rows.append(f"{folder}: {len(files)} files, {sum(len(lines[name]) for name in files)} lines: {names}")
    total = sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in lines)
    executed_lines = sum(map(len, lines.values()))
    return "\n".join(
        [
            *rows,
            f"executed: {len(lines)} files ({total} lines), of these {executed_lines} in functions that ran",
        ]
    )


def main() -> None:
    """Run the trainer, and print the table when this process exits."""
    from meshwright.train.main import main as train

    leave = os._exit

    def leave_counted(code: int) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        print(summary(set(_code)), flush=True)
        leave(code)

    if os.environ.get("RANK", "0") == "0":
        os._exit = leave_counted  # type: ignore[assignment]
        threading.setprofile(watch)
        sys.setprofile(watch)
    train(sys.argv[1:])


if __name__ == "__main__":
    main()
