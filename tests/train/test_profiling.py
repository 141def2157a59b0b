"""A window of profiled steps, and what becomes of a run whose profile cannot be made."""

from pathlib import Path

import pytest
import torch

from train.profiling import ProfileConfig, StepProfiler


def steps(profiler: StepProfiler, count: int) -> list[Path]:
    traces = []
    for step in range(1, count + 1):
        profiler.before_step(step)
        torch.ones(2).sum()
        traces.append(profiler.after_step(step))
    return [trace for trace in [*traces, profiler.close()] if trace]


def test_a_window_becomes_one_trace(tmp_path: Path) -> None:
    said: list[str] = []
    (trace,) = steps(StepProfiler(ProfileConfig(2, 2), tmp_path / "profile", True, said.append), 4)
    assert trace.stat().st_size > 0
    assert said == []


@pytest.mark.parametrize("count", [2, 4])
def test_a_folder_that_cannot_be_made_is_one_warning(count: int, tmp_path: Path) -> None:
    """After the window, and where the loop ends inside it."""
    (tmp_path / "profile").write_text("a file")
    said: list[str] = []
    assert steps(StepProfiler(ProfileConfig(2, 2), tmp_path / "profile", True, said.append), count) == []
    (warning,) = said
    for words in ("no profile from step 2", str(tmp_path / "profile"), "FileExistsError", "the run goes on"):
        assert words in warning
