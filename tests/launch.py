"""Start the real command, as a user would, in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TINY = ["--model.dim=32", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.ffn_dim=64",
        "--train.seq_len=32", "--train.micro_batch_size=2", "--train.global_batch_size=8", "--optim.warmup_steps=2",
        "--optim.lr=3e-3", "--metrics.every=1"]  # fmt: skip
EAGER = ["--parallel.compile.enabled=false"]


def command(processes: int, *arguments: str, module: str = "train.main") -> list[str]:
    """The command line for a number of processes; one runs without torchrun."""
    if processes == 1:
        return [sys.executable, "-m", module, *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*torchrun, "-m", module, *arguments]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, without what a launcher or a test runner may have put there."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def run(processes: int, *arguments: str, module: str = "train.main", timeout_s: float = 120, **env: str) -> Any:
    """Run to the end; the result has returncode, stdout and stderr."""
    return subprocess.run(command(processes, *arguments, module=module), cwd=ROOT, env=environment(**env),
                          capture_output=True, text=True, timeout=timeout_s, check=False)  # fmt: skip


def read_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """metrics.jsonl by step; the last row of a step counts."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def read_status(folder: Path) -> dict[str, Any]:
    """status.json."""
    return json.loads((folder / "status.json").read_text())


def write_text(folder: Path) -> list[str]:
    """A few hundred kilobytes that can be learned, and the arguments that train on it."""
    text = folder / "text"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.txt").write_text("".join(f"line {n} of text {i} squares to {n * n}\n" for n in range(i, 1500 + i)))
    return [f"--data.source={text}", f"--data.cache_dir={folder / 'cache'}", "--data.held_out=0.2"]
