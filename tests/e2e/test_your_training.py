"""docs/your-training.md: its `mine.py` trains as it stands, the same on one process and on two, and its hooks
are told what they were promised, also after a stop."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from meshwright.train.checkpoint.commit import find_newest
from meshwright.train.checkpoint.manifest import read_manifest
from meshwright.train.checkpoint.reader import open_checkpoint, read_full
from tests.support.launch import EAGER, TINY, read_status, rows_in, run, write_text

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your-training.md").read_text(encoding="utf-8")
# a stand-in for the logger, which writes down what it is told
WANDB = """
import json, pathlib
def init(project, dir, config):
    global file
    file = pathlib.Path(dir, "wandb.jsonl").open("a")
    file.write(json.dumps(["init", config["optim"]["schedule"]]) + "\\n")
def log(row, step):
    file.write(json.dumps([step, row]) + "\\n")
def finish():
    file.write('["finish"]\\n')
    file.close()
"""
# what is not on the page: writes down when it is called, and with what gradients
CALLS = """
class Calls(Hook):
    def __init__(self, run):
        self.run, self.calls = run, []
        self.gradients = list(run.training.sharded.model.parameters())
    def start(self, position):
        self.calls.append(f"start {position.step}")
    def before_step(self, step):
        self.calls.append(f"before {step}")
    def before_optimizer(self, step):
        assert all(p.grad is not None for p in self.gradients)
        self.calls.append(f"optimizer {step}")
    def after_step(self, done):
        assert done.result.loss.isfinite()
        self.calls.append(f"after {done.step}")
    def on_report(self, row):
        self.calls.append(f"report {row['step']}")
    def on_evaluation(self, step, scores):
        self.calls.append(f"evaluation {step}")
    def close(self):
        self.calls.append("close")
        path = self.run.folder / f"calls-{self.run.ranks.rank}"
        path.write_text("\\n".join(self.calls))
class Stop(Hook):
    def __init__(self, run):
        self.rank = run.ranks.rank
    def after_step(self, done):
        if done.step == 3 and self.rank == 0:
            self.request_stop("enough")
def mean(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
def drawn(first, count, seq_len):
    return torch.randint(256, (count, seq_len + 1))
def late(step, steps):
    return float("nan")
def falling(step, steps):
    return 4 - step
def list_of(first, count, seq_len):
    return [[0] * (seq_len + 1)] * count
class Not:
    pass
class Best(Hook):
    # rebinds its state, which is infinite until the first evaluation
    def __init__(self, run):
        self.best = torch.tensor(float("inf"))
    def on_evaluation(self, step, scores):
        self.best = torch.minimum(self.best, torch.tensor(mean_loss(scores)))
    def state(self):
        return {"best": self.best}
class Late(Hook):
    def __init__(self, run):
        raise ValueError("no room")
class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
    def forward(self, logits, targets):
        return self.weight * mean(logits, targets) * targets.numel()
weighted = Weighted()
class Two(Hook):
    # fails, and fails to close
    def after_step(self, done):
        raise RuntimeError("the first")
    def close(self):
        raise RuntimeError("the second")
"""
SEAMS = ["--train.loss=mine:smoothed", "--data.factory=mine:copies", "--optim.name=mine:nadam"]
SEAMS += ["--optim.schedule=mine:triangle"]


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    manifest = read_manifest(checkpoint)
    names = [name for name in manifest.tensors if not name.startswith("random.")]
    files = open_checkpoint(checkpoint, manifest)
    return {name: read_full(files, manifest, name) for name in names}


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    """The keys of a tiny run in a folder that has the page's mine.py, with an evaluation set."""
    (tmp_path / "mine.py").write_text("".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)) + CALLS)
    (tmp_path / "wandb.py").write_text(WANDB)
    (tmp_path / "broken.py").write_text("x = 1\nx.y\n")
    source = next(key for key in write_text(tmp_path) if key.startswith("--data.source="))
    data = [
        f"--data.validation={{text: {source.partition('=')[2]}}}",
        f"--data.cache_dir={tmp_path / 'cache'}",
    ]
    return [
        *TINY,
        *EAGER,
        *data,
        *SEAMS,
        "--train.steps=6",
        "--train.eval_every=2",
        "--train.eval_sequences=8",
    ]


@pytest.mark.parametrize(
    "mesh", ["--parallel.tp=2", pytest.param("--parallel.cp=2", marks=pytest.mark.sampled(3, day=2))]
)
def test_everything_of_yours_trains_the_same_on_every_mesh(
    keys: list[str], tmp_path: Path, mesh: str
) -> None:
    """Also on ranks that have a part of the logits, or of the tokens."""
    losses = []
    for processes, of_mesh in ((2, [mesh]), (1, [])):
        folder = tmp_path / f"run{processes}"
        done = run(processes, f"--run.dir={folder}", *keys, *of_mesh, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = rows_in(folder)
        losses.append([row[name] for row in rows for name in ("loss", "eval_loss") if name in row])
        trained = [row for row in rows if "lr" in row]
        lrs = [min(step / 1.8, (7 - step) / 4.2, 1.0) * 3e-3 for step in range(1, 7)]
        assert [row["lr"] for row in trained] == pytest.approx(lrs)
        assert trained[-1]["sequences"] == 6 * 8
    assert len(losses[0]) == 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_hooks_are_told_of_everything_in_order_and_their_state_goes_on(
    keys: list[str], tmp_path: Path
) -> None:
    hooks, folder = "mine:Average,mine:Wandb,mine:Patience,mine:Calls", tmp_path / "run"
    keys = [*keys, f"--run.dir={folder}", "--checkpoint.every=1", "--checkpoint.keep=0"]
    stopped = run(2, *keys, f"--train.hooks=[{hooks},mine:Stop]", folder=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped at step" in stopped.stdout
    assert "(enough)" in stopped.stdout
    calls = (folder / "calls-1").read_text().splitlines()
    assert calls == (folder / "calls-0").read_text().splitlines()
    assert calls[:2] == ["start 0", "evaluation 0"]
    assert calls[2:10] == [
        "report 0",
        *(f"{when} 1" for when in ("before", "optimizer", "after", "report")),
        *(f"{when} 2" for when in ("before", "optimizer", "after")),
    ]
    assert calls[10:12] == ["evaluation 2", "report 2"]
    assert calls[-1] == "close"

    resumed = run(1, *keys, f"--train.hooks=[{hooks}]", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    saved = [_tensors(folder / f"checkpoints/step-{step:08d}") for step in range(1, 7)]
    names = [name.removeprefix("model.") for name in saved[0] if name.startswith("model.")]
    for before, after in itertools.pairwise(saved):  # also where the run was stopped, on two processes
        for name in names:
            moved = 0.9 * before[f"hook.Average.{name}"] + 0.1 * after[f"model.{name}"]
            torch.testing.assert_close(after[f"hook.Average.{name}"], moved)
    logged = [json.loads(line) for line in (folder / "wandb.jsonl").read_text().splitlines()]
    assert [entry for entry in logged if len(entry) == 1] == [["finish"]] * 2
    assert [row for _, row in (entry for entry in logged if entry[0] not in ("init", "finish"))] == rows_in(
        folder
    )
    assert find_newest(folder).name == "step-00000006"


@pytest.mark.parametrize(
    ("key", "fact"),
    [
        ("--train.loss=mine:mean", "must return the sum over the targets"),
        ("--data.factory=mine:drawn", "when asked again"),
        ("--optim.schedule=mine:late", "returned nan for step 1"),
        ("--train.hooks=[mine:Not]", "must be a class below meshwright.train.hooks.Hook"),
        ("--train.hooks=[broken:Hook]", "broken.py:2)"),
        ("--data.factory=mine:list_of", "not a builtins.list"),
        ("--optim.schedule=mine:falling", "returned -1 for step 5"),
        (
            "--train.loss=mine:list_of",
            "must be a function of logits and targets: missing a required argument",
        ),
        ("--train.loss=mine:weighted", "has parameters, which nothing would train"),
    ],
)
def test_what_is_not_as_promised_is_one_message_before_anything_is_written(
    keys: list[str], tmp_path: Path, key: str, fact: str
) -> None:
    done = run(1, f"--run.dir={tmp_path / 'run'}", *keys, key, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert fact in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_what_only_a_checkpoint_names_is_not_imported(keys: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run(
        1,
        f"--run.dir={folder}",
        *keys,
        "--train.steps=1",
        "--checkpoint.every=1",
        "--train.hooks=[mine:Average]",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    config = find_newest(folder) / "config.yaml"
    refused = run(1, f"--config={config}", f"--run.dir={tmp_path / 'other'}", folder=tmp_path)
    assert refused.returncode == 2
    assert "which only a checkpoint names" in refused.stderr


def test_a_state_may_be_infinite_and_rebound_and_the_first_error_of_a_run_is_the_one_that_is_told(
    keys: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    keys = [*keys, f"--run.dir={folder}", "--checkpoint.every=1", "--checkpoint.keep=0"]
    done = run(1, *keys, "--train.eval_every=4", "--train.hooks=[mine:Best]", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    best = [_tensors(folder / f"checkpoints/step-{step:08d}")["hook.Best.best"] for step in (4, 5)]
    scores = [row["eval_loss"] for row in rows_in(folder) if "eval_loss" in row]
    assert [float(value) for value in best] == pytest.approx([scores[0], min(scores[:2])])
    failed = run(1, *keys, "--train.steps=7", "--train.hooks=[mine:Two]", folder=tmp_path)
    assert failed.returncode == 1
    assert read_status(folder)["reason"] == "RuntimeError: the first"
    assert "not closed: RuntimeError: the second" in failed.stderr
    failed = run(1, *keys, "--train.steps=7", "--train.hooks=[mine:Calls,mine:Late]", folder=tmp_path)
    assert "ValueError: no room" in failed.stderr
    assert (folder / "calls-0").read_text() == "close"
