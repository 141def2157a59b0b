"""What the tests of faults have in common: launches of a tiny run, moments to wait for, and what must be left
behind."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.tools.processes import children, find_running
from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.checkpoint.verify import verify_alone
from tests.support import launch
from tests.support.launch import EAGER, TINY, Launch, kill, read_metrics, read_status
from tests.support.limited import LIMITED
from tests.support.nested import NESTED

LIMIT_S = launch.LIMIT_S
FOR_EVER = 100_000  # steps


def tiny(data: Sequence[str], *more: str, steps: int = FOR_EVER) -> list[str]:
    """The arguments of a tiny eager run that would last for hours, but for its folder. The learning rate
    stays as it is, so a run of fewer steps is the beginning of a longer one."""
    ends = (f"--train.steps={steps}", "--optim.schedule=constant", "--metrics.tensorboard=false")
    return [*TINY, "--train.global_batch_size=4", *EAGER, *data, *ends, *more]


@contextmanager
def started(processes: int, folder: Path, arguments: Sequence[str]) -> Iterator[Launch]:
    """A run in `folder` on so many ranks, whose output goes beside it."""
    with launch.started(
        processes, *arguments, f"--run.dir={folder}", output=folder.with_name(f"{folder.name}.txt")
    ) as running:
        yield running


@contextmanager
def torchrun(
    folder: Path, options: Sequence[str], arguments: Sequence[str], name: str = "torchrun", limit: str = ""
) -> Iterator[Launch]:
    """The same under torchrun, which is the launch's only process; `workers` are those that it has started.
    `limit`: of tests/support/limited.py, on it and them."""
    words = ["torch.distributed.run", *options, "-m", "train.main", *arguments, f"--run.dir={folder}"]
    words, module = ([limit, *words], LIMITED) if limit else (words, NESTED)
    with launch.started(1, *words, output=folder.with_name(f"{name}.txt"), module=module) as running:
        try:
            yield running
        finally:
            left = workers(running)
            running.ranks[0].kill()
            kill(left)


def workers(running: Launch) -> list[int]:
    """Process ids of torchrun's workers that there are at this moment, in the order of their ranks, in which
    it starts them."""
    return sorted(pid for pid in children(running.ranks[0].pid) if find_running([pid]))


def steps_of(folder: Path) -> set[int]:
    """The steps in metrics.jsonl so far."""
    return set(read_metrics(folder)) if (folder / "metrics.jsonl").exists() else set()


def wait(running: Launch, happened: Callable[[], object]) -> None:
    """Until it has happened; an AssertionError if the run ends before."""
    assert running.wait_until(happened), f"the run has ended, and printed:\n{running.output()[-3000:]}"


def wait_for_step(running: Launch, folder: Path, step: int) -> None:
    """Until a step is in metrics.jsonl."""
    wait(running, lambda: max(steps_of(folder), default=0) >= step)


def wait_for_commit(running: Launch, folder: Path, step: int) -> None:
    """Until the checkpoint of this step or of a later one is committed: retention (checkpoint.keep) deletes
    the older ones."""
    wait(running, lambda: any(step_of(path) >= step for path in list_checkpoints(folder / "checkpoints")))


def partials(folder: Path) -> list[Path]:
    """Checkpoints that are being written."""
    return list((folder / "checkpoints").glob(".step-*.partial"))


def rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl, in the order in which they were written."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    return {
        step: (row["loss"], row["grad_norm"]) for step, row in read_metrics(folder).items() if "loss" in row
    }


def check_stopped(folder: Path, reason: str) -> int:
    """The run has stopped as it was asked to, saved at the step that it says, and everything committed
    verifies; that step."""
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("stopped", reason)
    assert check_commits(folder) == status["step"]
    assert max(steps_of(folder)) == status["step"]
    assert not partials(folder)
    return status["step"]


def check_commits(folder: Path) -> int:
    """Everything committed verifies; the newest step, 0 if there is none."""
    found = [verify_alone(path).position.step for path in list_checkpoints(folder / "checkpoints")]
    return max(found, default=0)
