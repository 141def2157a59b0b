"""What the tests of faults have in common: launches of a tiny run, moments to wait for, and what must be left behind."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.launch import EAGER, TINY, read_metrics, read_status
from tools.bench.launched import Launch, launched
from train.checkpoint.folder import list_checkpoints
from train.checkpoint.verify import verify_alone

LIMIT_S = 120.0  # for anything that is waited for: the machine may be busy
FOR_EVER = 100_000  # steps


def tiny(data: Sequence[str], *more: str, steps: int = FOR_EVER) -> list[str]:
    """The arguments of a tiny eager run that would last for hours, but for its folder."""
    return [*TINY, *EAGER, *data, f"--train.steps={steps}", "--metrics.tensorboard=false", *more]


@contextmanager
def started(processes: int, folder: Path, arguments: Sequence[str], torchrun: Sequence[str] = ()) -> Iterator[Launch]:
    """A run in `folder`, whose output goes beside it."""
    with launched(processes, [*arguments, f"--run.dir={folder}"], folder.with_name(f"{folder.name}-logs"), torchrun) as launch:
        yield launch


def steps_of(folder: Path) -> set[int]:
    """The steps in metrics.jsonl so far."""
    return set(read_metrics(folder)) if (folder / "metrics.jsonl").exists() else set()


def wait(launch: Launch, happened: Callable[[], object]) -> None:
    """Until it has happened; an AssertionError if the run ends before."""
    assert launch.wait_for(lambda: bool(happened()), LIMIT_S), launch.output()[-3000:]


def wait_for_step(launch: Launch, folder: Path, step: int) -> None:
    """Until a step is in metrics.jsonl."""
    wait(launch, lambda: max(steps_of(folder), default=0) >= step)


def partials(folder: Path) -> list[Path]:
    """Checkpoints that are being written."""
    return list((folder / "checkpoints").glob(".step-*.partial"))


def rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl, in the order in which they were written."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_stopped(folder: Path, reason: str) -> int:
    """The run has stopped as it was asked to, saved at the step that it says, and everything committed verifies; that step."""
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
