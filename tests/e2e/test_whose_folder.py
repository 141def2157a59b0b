"""Whose folder is it: a start that is refused changes nothing in run.dir, whoever makes it and however often,
and the command that began a training goes on with it, whoever starts it again."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.launch import read_status, run
from tests.support.run_faults import check_commits, tiny

DRAW = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"])
# processes, and what only a launcher sets: ways in which a start may look like a restart
LAUNCHERS: dict[str, tuple[int, dict[str, str]]] = {
    "by hand": (1, {}),
    "torchrun": (2, {"TORCHELASTIC_RUN_ID": "one"}),
    "Slurm": (1, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}),
}


def start(launcher: str, folder: Path, arguments: list[str]) -> CompletedProcess[str]:
    processes, env = LAUNCHERS[launcher]
    return run(processes, *arguments, f"--run.dir={folder}", **env)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    """A finished run with checkpoints of steps 1 and 2, and beside it the first of another training."""
    folder = tmp_path_factory.mktemp("whose") / "run"
    arguments = tiny(data, "--checkpoint.every=1", steps=2)
    assert run(1, *arguments, f"--run.dir={folder}").returncode == 0
    shutil.copytree(step(folder, 1), folder.with_name("other") / "step-00000001")
    return folder


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08d}"


def contents(folder: Path) -> dict[str, str]:
    """The hash of each file, without the lock's own."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".lock")
    }


def damage(folder: Path) -> None:
    """Leave no checkpoint that verifies."""
    for file in folder.glob("checkpoints/*/*.safetensors"):
        os.truncate(file, file.stat().st_size - 1)


def nothing(folder: Path) -> None:
    pass


# what is wrong with the folder, and the keys of the start; RUN is the run's folder
REFUSED: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "from the beginning": (nothing, ["--checkpoint.resume=none"]),
    "another seed": (nothing, ["--checkpoint.resume=none", "--run.seed=7"]),
    "of another training": (nothing, ["--checkpoint.resume=RUN/../other/step-00000001"]),
    "back beside newer ones": (nothing, ["--checkpoint.resume=RUN/checkpoints/step-00000001"]),
    "of another size": (nothing, ["--model.ffn_dim=96"]),
    "of another dtype": (nothing, ["--optim.state_dtype=bfloat16"]),
    "damaged": (damage, []),
    "data that is too short": (nothing, ["--train.seq_len=400000", "--model.max_seq_len=400000"]),
    "a plan that cannot be": (nothing, ["--parallel.dp_shard=3"]),
}


def refused(refusal: str, data: list[str], trained: Path, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the contents of a copy of the run, with what is wrong, and the arguments of a start."""
    shutil.copytree(trained.parent, folder.parent)
    wrong, keys = REFUSED[refusal]
    wrong(folder)
    arguments = tiny(data, "--checkpoint.every=1", *keys, steps=4)
    return contents(folder), [argument.replace("RUN", str(folder)) for argument in arguments]


@pytest.mark.parametrize(
    "refusals",
    [
        pytest.param(DRAW.sample(sorted(REFUSED), 2), id="drawn"),
        pytest.param(sorted(REFUSED), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_refused_start_ends_with_2_and_changes_nothing(refusals, data, trained, tmp_path) -> None:
    for refusal in refusals:
        launcher, folder = DRAW.choice(sorted(LAUNCHERS)), tmp_path / refusal / "run"
        before, arguments = refused(refusal, data, trained, folder)
        result = start(launcher, folder, arguments)
        assert result.returncode == (1 if launcher == "torchrun" else 2), (refusal, launcher, result)
        assert "Error: " in result.stderr
        assert "Traceback" not in result.stderr
        assert not before.items() ^ contents(folder).items(), (refusal, launcher)


BEGINNINGS = {
    "branch": "RUN/../other/step-00000001",
    "roll-back": "RUN/checkpoints/step-00000001",
    "new": "none",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_the_command_that_began_a_training_goes_on_whoever_starts_it(
    beginning, data, trained, tmp_path
) -> None:
    """A branch, a roll-back after its newer checkpoints were moved away, and a beginning with resume=none."""
    folder = tmp_path / "a" / "run"
    shutil.copytree(trained.parent, folder.parent)
    shutil.rmtree(folder if beginning != "roll-back" else step(folder, 2))
    resume = BEGINNINGS[beginning].replace("RUN", str(folder))
    for last in (2, 3):
        keys = [f"--checkpoint.resume={resume}", "--checkpoint.every=1"]
        result = start(DRAW.choice(sorted(LAUNCHERS)), folder, tiny(data, *keys, steps=last))
        assert result.returncode == 0, result.stderr
    assert (read_status(folder)["resumed_from"], check_commits(folder)) == (2, 3)
    training = json.loads((folder / "training.json").read_text())
    same_as_before = training["id"] == json.loads((trained / "training.json").read_text())["id"]
    assert same_as_before == (beginning == "roll-back")
    shown = run(1, "show", str(folder), module="tools.checkpoint").stdout
    assert f"training {training['id']}" in shown
    assert "goes on from step-00000003" in shown


@pytest.mark.sampled(2)
def test_a_branch_without_a_checkpoint_begins_where_it_began(data, trained, tmp_path) -> None:
    """It was killed before its first save, and a script starts it again with resume=auto."""
    folder, other = tmp_path / "run", trained.parent / "other" / "step-00000001"
    for keys, last in (([f"--checkpoint.resume={other}"], 1), ([], 2)):
        result = start("by hand", folder, tiny(data, "--checkpoint.every=1", *keys, steps=last))
        assert result.returncode == 0, result.stderr
        shown = run(1, "show", str(folder), module="tools.checkpoint")
        assert f"begun from {other}" in shown.stdout, shown
    assert read_status(folder)["resumed_from"] == 1
