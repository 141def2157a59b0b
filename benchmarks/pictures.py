"""Take the pictures of docs/ again: predicted steps, by the commands of the pages that show them; a measured
step; and a sweep's page and TensorBoard in a browser. benchmarks.scaling draws docs/scaling.svg."""

import argparse
import contextlib
import datetime
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.support.documents import ROOT, block_of, printed
from meshwright.tools.cli import run_tool
from meshwright.tools.processes import BenchError, own_environment, python_command, started
from meshwright.train.calibration.compute import cpu_model

DOCS = ROOT / "docs"
DRAWN = re.compile(r"^python -m tools\.plan (.*) --timeline docs/(\S+)$", re.MULTILINE)
MACHINE = re.compile(r"(on two gloo ranks \().*?(\),\sprofiled)", re.DOTALL)  # of the measured step
PROFILED = (
    *("--train.steps=20", "--profile.start=10", "--profile.all_ranks=true"),
    *("--parallel.plan=auto", "--parallel.dp_replicate=1", "--parallel.tp=1"),
)
SWEEP = """\
config: llama_debug.yaml
overrides:
  run.threads: 1
  parallel.compile.enabled: false
  parallel.plan: auto
  train.steps: 40
  train.global_batch_size: 4
  train.eval_every: 20
  train.eval_sequences: 16
  optim.warmup_steps: 4
  metrics.every: 2
  checkpoint.every: 0
grid:
  optim.lr: [3.0e-4, 3.0e-3]
seeds: [0, 1, 2]
best: eval_loss
"""
RUNS = 6
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZES = {"sweep-wide.png": (1200, 1240), "sweep-narrow.png": (500, 1000), "tensorboard.png": (1480, 1060)}
WAIT_S = 60  # for TensorBoard to read the runs
RENDER_MS = 30_000  # of a page's own time before its picture is taken


def draw_predicted(folder: Path) -> None:
    """Run every command of the pages that draws a predicted step into docs/."""
    for page in sorted(DOCS.glob("*.md")):
        for options, name in DRAWN.findall(page.read_text(encoding="utf-8")):
            printed([*shlex.split(options), "--timeline", str(DOCS / name)])
            print(f"docs/{name}", flush=True)


def draw_measured(folder: Path) -> None:
    """Profile a run on two gloo ranks, draw a step of it, and name the machine in the page."""
    run, page = "runs/llama_debug", DOCS / "profiling.md"
    train = [*python_command("meshwright.train.main", 2), "--config=llama_debug.yaml", f"--run.dir={run}"]
    output_of([*train, *PROFILED], folder)
    picture = f"--picture={DOCS / 'step-measured.svg'}"
    output_of([*python_command("meshwright.tools.trace", 1), run, picture], folder)
    machine = f"{os.cpu_count()} cores of {cpu_model()}, {datetime.date.today():%-d %B %Y}"
    text, found = MACHINE.subn(rf"\g<1>{machine}\g<2>", page.read_text(encoding="utf-8"))
    if not found:
        raise BenchError(f"docs/{page.name} names no machine: change MACHINE in benchmarks/pictures.py")
    page.write_text(text, encoding="utf-8")
    print("docs/step-measured.svg", flush=True)


def take_views(folder: Path) -> None:
    """Run a sweep, quote what it prints in its page, and take pictures of its report and of TensorBoard."""
    browser = find_browser()
    (folder / "rates.yaml").write_text(SWEEP)
    lines = output_of([*python_command("meshwright.tools.sweep", 1), "rates.yaml"], folder).splitlines()
    quoted = [*lines[:2], "...", *lines[-3:]]
    page = DOCS / "experiments.md"
    text, wrapped = page.read_text(encoding="utf-8"), [textwrap.fill(line, 160) for line in quoted]
    page.write_text(text.replace(block_of(text, f"[1/{RUNS}]"), "\n".join(wrapped)), encoding="utf-8")
    report = (folder / "sweeps/rates/report.html").as_uri()
    with tensorboard(folder, "sweeps/rates") as board:
        for name, size in SIZES.items():
            take_view(browser, f"{board}#custom_scalars" if "board" in name else report, size, DOCS / name)


def find_browser() -> str:
    """Return the path of the first of BROWSERS. Raises BenchError if there is none."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise BenchError(
        f"the views need a browser: none of {', '.join(BROWSERS)} is in a folder of $PATH: install one "
        "(Debian: apt-get install chromium), or take only the others: predicted measured"
    )


def take_view(browser: str, address: str, size: tuple[int, int], path: Path) -> None:
    """Write what a browser shows in a window of `size` pixels."""
    options = [
        *("--headless", "--hide-scrollbars", f"--window-size={size[0]},{size[1]}"),
        *(f"--virtual-time-budget={RENDER_MS}", f"--screenshot={path}"),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium refuses to run as root with its sandbox
    ]
    output_of([browser, *options, address], path.parent)
    print(f"docs/{path.name}", flush=True)


@contextlib.contextmanager
def tensorboard(folder: Path, runs: str) -> Iterator[str]:
    """Serve the runs in a folder, and give the server's address once it has read all of them."""
    server = [*python_command("tensorboard.main", 1), f"--logdir={runs}", "--host=127.0.0.1", "--port=0"]
    command, log = f"cd {shlex.quote(str(folder))} && exec {shlex.join(server)}", folder / "board.txt"
    with started(command, own_environment(), log):
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if found := re.search(r"http://\S+", log.read_text(encoding="utf-8")):
                with urllib.request.urlopen(f"{found[0]}data/runs", timeout=WAIT_S) as answer:
                    if answer.read().count(b"/tb") == RUNS:
                        yield found[0]
                        return
            time.sleep(0.5)
        raise BenchError(f"TensorBoard has not read {RUNS} runs in {WAIT_S} s: {log.read_text()}")


def output_of(command: Sequence[str], folder: Path) -> str:
    """Run a command in a folder and return what it prints. Raises BenchError if it fails."""
    environment = own_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"exit code {done.returncode} from {shlex.join(command)}:\n{done.stderr}")
    return done.stdout


KINDS: dict[str, Callable[[Path], None]] = {
    "predicted": draw_predicted,
    "measured": draw_measured,
    "views": take_views,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Take the pictures of the kinds that the arguments name. Raises BenchError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("kind", nargs="*", help=f"{', '.join(KINDS)} (default: all of them)")
    kinds = parser.parse_args(arguments).kind or list(KINDS)
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"no pictures of kind {', '.join(unknown)}: choose from {', '.join(KINDS)}")
    if "views" in kinds:
        find_browser()
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            KINDS[kind](Path(folder))


if __name__ == "__main__":
    run_tool(main)
