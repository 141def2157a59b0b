"""docs/your-model.md: its script runs as it stands, on any number of processes, and resumes after a kill; and
`tools.check` in a folder of somebody else."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forks import fork_module
from tests.support.launch import LIMIT_S, family, kill

ROOT = Path(__file__).parents[2]
SCRIPT = re.search(r"```python\n(.*?)```", (ROOT / "docs/your-model.md").read_text(), re.DOTALL)


def start(folder: Path, processes: int, script: str = "mine.py") -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        script,
    ]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    paths = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, text=True, env=paths, **output)  # type: ignore[call-overload, no-any-return]


def norms(done: subprocess.Popen[str]) -> list[float]:
    output, _ = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 0, output
    return [float(norm) for norm in re.findall(r"step 20, gradient norm (\d+\.\d+)", output)]


@pytest.mark.slow
@pytest.mark.sampled(5)
def test_a_script_for_ddp_trains_the_same_with_the_lines_of_the_page_changed(tmp_path: Path) -> None:
    block = re.search(r"```diff\n(.*?)```", (ROOT / "docs/your-model.md").read_text(), re.DOTALL)
    assert block
    lines = block[1].splitlines()
    (tmp_path / "gpt.py").write_text("from tests.support.factories import NanoGPT as GPT\n")
    losses = {}
    for name, processes, left_out in (("ddp", 2, "+"), ("shard", 2, "-"), ("shard", 4, "-")):
        script = "\n".join(line[1:] for line in lines if not line.startswith(left_out))
        eager = "parallel=mw.ParallelConfig(compile=mw.CompileConfig(enabled=False))"
        script = script.replace("mw.shard(model,", f"mw.shard(model, {eager}, example=")
        end = "import sys; sys.stdout.flush(); os._exit(0)"  # the page says why
        (tmp_path / f"{name}.py").write_text(f"{script}\n{end}\n")
        done = start(tmp_path, processes, f"{name}.py")
        output, _ = done.communicate(timeout=LIMIT_S)
        assert done.returncode == 0, output
        steps = [list(map(float, re.findall(rf"step {i}: loss (\d+\.\d{{6}})", output))) for i in range(10)]
        assert {len(step) for step in steps} == {processes}
        losses[name, processes] = [sum(step) / processes for step in steps]
    for together in losses.values():
        assert together == pytest.approx(losses["ddp", 2], rel=1e-5)


@pytest.fixture
def script() -> str:
    assert SCRIPT
    text = SCRIPT[1].replace(
        "activation_checkpoint=", "compile=mw.CompileConfig(backend='aot_eager'), activation_checkpoint="
    )
    assert sum(bool(line.strip()) for line in SCRIPT[1].splitlines()) <= 40
    return text


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_the_script_trains_the_same_on_1_2_and_4_processes_and_resumes(tmp_path: Path, script: str) -> None:
    results = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        (folder / "mine.py").write_text(script)
        results[processes] = norms(start(folder, processes))
    assert len(results[2]) == 2
    assert results[2] == pytest.approx(results[1] * 2, rel=1e-4)

    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "mine.py").write_text(script)
    first = start(killed, 2)
    while not (killed / "checkpoints/step-00000010").is_dir() and first.poll() is None:
        time.sleep(0.05)
    kill(family(first.pid))
    first.communicate()
    assert norms(start(killed, 4)) == pytest.approx(results[1] * 4, rel=1e-4)


FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, broken):
        super().__init__()
        self.linear, self.broken = nn.Linear(8, 8), broken
    def forward(self, x):
        if self.broken:
            print("a graph break")
        return x + self.linear(x)

def build(broken=False):
    return nn.Sequential(*(Block(broken) for _ in range(3))), (torch.randn(4, 8),)
"""


def run_check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright.tools.check", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_the_command_proves_a_model_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(FACTORY)
    done = run_check(tmp_path, "--model.factory=theirs:build", "--backend=aot_eager")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, largest difference" in done.stdout
    broken = run_check(
        tmp_path, "--model.factory=theirs:build", "--model.args.broken=true", "--backend=aot_eager"
    )
    assert broken.returncode == 2
    assert "0 cannot be compiled as one graph" in broken.stderr
    assert "parallel.compile.fullgraph=false" in broken.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--modle.args.x=1", "unknown argument --modle.args.x=1"),
        ("--model.args.x=1", "got an unexpected keyword argument 'x'"),
    ],
)
def test_wrong_commands_say_what_is_wrong(tmp_path: Path, argument: str, message: str) -> None:
    """tests/train/model/test_factory.py has what else may be wrong with a factory."""
    (tmp_path / "theirs.py").write_text(FACTORY)
    command = ["--model.factory=theirs:build", "--tp=2", argument]
    files = {"output": tmp_path / "out", "errors": tmp_path / "err"}
    process = fork_module("meshwright.tools.check", *command, folder=tmp_path, **files)
    assert process.wait(LIMIT_S) == 2
    assert message in (tmp_path / "err").read_text()
