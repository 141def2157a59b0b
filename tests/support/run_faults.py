"""Common parts of the tests of faults: launches of a tiny run, waits, and checks of its folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshwright.tools.processes import children, find_running
from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.checkpoint.verify import verify_alone
from tests.support import launch
from tests.support.launch import EAGER, TINY, Launch, kill, read_metrics, read_status
from tests.support.limited import LIMITED
from tests.support.nested import NESTED

LIMIT_S = launch.LIMIT_S
ENDLESS_STEPS = 100_000  # steps


def tiny(data: Sequence[str], *more: str, steps: int = ENDLESS_STEPS) -> list[str]:
    """The arguments, except run.dir, of a tiny eager run that would last for hours. The learning rate is
    constant, so that a run of fewer steps is the beginning of a longer one."""
    ends = (f"--train.steps={steps}", "--optim.schedule=constant", "--metrics.tensorboard=false")
    return [*TINY, "--train.global_batch_size=4", *EAGER, *data, *ends, *more]


@contextmanager
def started(processes: int, folder: Path, arguments: Sequence[str]) -> Iterator[Launch]:
    """A run in `folder` on `processes` ranks; its output is in a file next to the folder."""
    with launch.started(
        processes, *arguments, f"--run.dir={folder}", output=folder.with_name(f"{folder.name}.txt")
    ) as running:
        yield running


@contextmanager
def torchrun(
    folder: Path,
    options: Sequence[str],
    arguments: Sequence[str],
    name: str = "torchrun",
    limit: str = "",
    program: Sequence[str] = ("train.main",),
) -> Iterator[Launch]:
    """`started` with torchrun as the launch's only process; `workers` returns the processes that it has
    started. `limit`: a limit of tests/support/limited.py for all of them. `program`: the workers' module and
    its first arguments."""
    command = ["torch.distributed.run", *options, "-m", *program, *arguments, f"--run.dir={folder}"]
    command, module = ([limit, *command], LIMITED) if limit else (command, NESTED)
    with launch.started(1, *command, output=folder.with_name(f"{name}.txt"), module=module) as running:
        try:
            yield running
        finally:
            left = workers(running)
            running.ranks[0].kill()
            kill(left)


def workers(running: Launch) -> list[int]:
    """The process ids of torchrun's running workers, in rank order, which is the order of their start."""
    return sorted(pid for pid in children(running.ranks[0].pid) if find_running([pid]))


def steps_of(folder: Path) -> set[int]:
    """The steps in metrics.jsonl so far."""
    return set(read_metrics(folder)) if (folder / "metrics.jsonl").exists() else set()


def wait(running: Launch, happened: Callable[[], object]) -> None:
    """Wait until `happened()` is true; AssertionError if the run ends before."""
    assert running.wait_until(happened), f"the run has ended, and printed:\n{running.output()[-3000:]}"


def wait_for_step(running: Launch, folder: Path, step: int) -> None:
    """Wait until a step is in metrics.jsonl."""
    wait(running, lambda: max(steps_of(folder), default=0) >= step)


def wait_for_commit(running: Launch, folder: Path, step: int) -> None:
    """Wait until the checkpoint of this step or of a later one is committed: retention (checkpoint.keep)
    deletes older ones."""
    wait(running, lambda: any(step_of(path) >= step for path in list_checkpoints(folder / "checkpoints")))


def partials(folder: Path) -> list[Path]:
    """Checkpoints that are being written."""
    return list((folder / "checkpoints").glob(".step-*.partial"))


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    return {
        step: (row["loss"], row["grad_norm"]) for step, row in read_metrics(folder).items() if "loss" in row
    }


def check_stopped(folder: Path, reason: str) -> int:
    """Assert that the run stopped for this reason, that it saved the step in its status, and that every
    commit verifies. Return that step."""
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("stopped", reason)
    assert check_commits(folder) == status["step"]
    assert max(steps_of(folder)) == status["step"]
    assert not partials(folder)
    return status["step"]


def check_commits(folder: Path) -> int:
    """Assert that every commit verifies. Return the newest step, 0 without commits."""
    steps = [verify_alone(path).position.step for path in list_checkpoints(folder / "checkpoints")]
    return max(steps, default=0)
