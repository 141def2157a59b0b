"""What the tests cost and how large the code is, against the ceilings of budget.toml.

    python -m tests.budget measure NAME FILE COMMAND...   run a command, and add its CPU seconds to FILE
    python -m tests.budget check [FILE]                   print everything; exit code 1 if a ceiling is broken

CPU seconds are those of the command's whole process tree, divided by those of a fixed piece of work that is
done just before and just after it: a slow or busy machine needs more of both. Ceilings of CPU have a margin
(MARGIN), counts of lines and files have none.
"""

import ast
import ctypes
import inspect
import json
import os
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARGIN = 1.4
PRODUCT = ("models", "parallel", "train", "tools")
IMPORTED = (
    "import sys, meshwright.train.main, meshwright.train.phases; "
    "print(sum(name.startswith('meshwright') for name in sys.modules))"
)
REAPER = 36  # PR_SET_CHILD_SUBREAPER: processes whose parent has ended become children of this one
REAP_S = 20.0


def fixed_work() -> None:
    """Do what most of the time of the tests goes to: Python that walks over trees, and small operators of
    torch with their gradients. A few seconds; it uses nothing of this project."""
    import argparse
    import typing

    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(600):
        layers(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(4):
        for module in (ast, argparse, inspect, typing):
            sum(
                len(ast.dump(node))
                for node in ast.walk(ast.parse(inspect.getsource(module)))
                if hasattr(node, "id")
            )


def measure_fixed_work() -> float:
    """CPU seconds of the fixed work, in two processes at once as the tests run."""
    before = _children_s()
    command = [sys.executable, "-c", "from tests.budget import fixed_work; fixed_work()"]
    workers = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert not any(worker.wait() for worker in workers)
    return (_children_s() - before) / 2


def measure(name: str, file: Path, command: Sequence[str]) -> int:
    """Run a command, add `name` to the measurements in a JSON file, and return its exit code."""
    ctypes.CDLL(None).prctl(REAPER, 1, 0, 0, 0)
    work = [measure_fixed_work()]
    before = _children_s()
    code = subprocess.call(command)
    _reap()
    seconds = _children_s() - before
    work.append(measure_fixed_work())
    measured = json.loads(file.read_text()) if file.exists() else {}
    measured[name] = {"cpu_s": round(seconds, 1), "work_s": round(sum(work) / 2, 2)}
    file.write_text(json.dumps(measured))
    return code


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _reap() -> None:
    """Wait for the processes that the command has left behind: fork servers end a moment after it."""
    deadline_s = time.monotonic() + REAP_S
    while time.monotonic() < deadline_s:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.05)


def counts() -> dict[str, int]:
    """Lines of the product and of its tests, and how many of our modules `train.main` imports."""
    imported = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {
        "lines_of_product": _lines(*PRODUCT),
        "lines_of_tests": _lines("tests"),
        "modules_of_train_main": int(imported.stdout),
    }


def _lines(*folders: str) -> int:
    files = subprocess.run(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return sum((ROOT / file).read_bytes().count(b"\n") for file in files)


def check(file: Path | None) -> int:
    """Print all values beside their ceilings; 1 if one is broken."""
    ceilings = tomllib.loads((ROOT / "tests/budget.toml").read_text(encoding="utf-8"))
    measured = json.loads(file.read_text()) if file else {}
    values: dict[str, tuple[float, str]] = {name: (count, "") for name, count in counts().items()}
    for name, seconds in measured.items():
        note = f"{seconds['cpu_s']:.0f} CPU s; the fixed work {seconds['work_s']:.2f}"
        values[name] = (seconds["cpu_s"] / seconds["work_s"], note)
    broken = []
    print(f"{'budget':24}{'value':>10}{'ceiling':>10}")
    for name, (value, note) in values.items():
        ceiling = ceilings[name]["ceiling"]
        limit = ceiling * MARGIN if name in measured else ceiling
        print(f"{name:24}{value:>10.6g}{ceiling:>10.6g}  {note}{'  <- broken' if value > limit else ''}")
        broken += [name] if value > limit else []
    if broken:
        print(
            f"{', '.join(broken)}: above the ceiling of tests/budget.toml. Make room, or raise it there, "
            "with the reason, in the commit of the capability that needs it"
        )
    return int(bool(broken))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", name, file, *command] if command:
            sys.exit(measure(name, Path(file), command))
        case ["check", *files] if len(files) < 2:
            sys.exit(check(Path(files[0]) if files else None))
        case _:
            sys.exit(__doc__)
