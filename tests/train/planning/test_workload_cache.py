"""A cached trace reads back equal; a file that cannot be read is traced again."""

from pathlib import Path

import pytest

from meshwright.parallel.compile.apply import use_cache_folder
from meshwright.parallel.config import CompileConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.planner.workload import ModuleWorkload
from meshwright.train.config_parser import parse_config
from meshwright.train.planning import captures, trace_model
from meshwright.train.planning.captures import remember
from meshwright.train.planning.predict import run_workload
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.trace_model import cases_of, trace_and_keep
from tests.support.launch import EAGER
from tests.support.plans import fullest

TINY = ["--model.dim=32", "--model.n_layers=2", "--train.seq_len=64", "--parallel.tp=2", *EAGER]


@pytest.fixture
def counted(monkeypatch) -> list[object]:
    """The cases that were traced."""
    traced: list[object] = []

    def trace(build, *settings):
        traced.append(build)
        return original(build, *settings)

    original = trace_model.eager_workload
    monkeypatch.setattr(trace_model, "eager_workload", trace)
    return traced


def work_of(folder: Path, *arguments: str) -> dict[str, ModuleWorkload]:
    trace_and_keep.cache_clear()  # as in another process
    config = parse_config([*TINY, f"--parallel.compile.cache_dir={folder}", *arguments])
    return dict(run_workload(config.job, plan_run(config.job, 4)).modules)


def test_a_folder_of_a_name_that_none_can_have_is_refused() -> None:
    with pytest.raises(PlanError, match=r"parallel\.compile\.cache_dir=.*null byte.*name another"):
        use_cache_folder(CompileConfig(cache_dir="a\0b"))


def check_alike(first: dict[str, ModuleWorkload], second: dict[str, ModuleWorkload]) -> None:
    """Two traces of one case are equal except for the order of summation."""
    for name, work in first.items():
        assert work.saved_bytes.at(2) == pytest.approx(second[name].saved_bytes.at(2))
        assert fullest(work.backward, 2) == pytest.approx(fullest(second[name].backward, 2))
        assert len(work.forward.operations) == len(second[name].forward.operations)


def test_another_case_or_other_code_is_traced_anew(
    tmp_path: Path, counted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = work_of(tmp_path)
    assert len(counted) == 3  # embedding, block, head
    assert work_of(tmp_path) == first
    assert len(counted) == len(list(tmp_path.iterdir())) == 3
    assert work_of(tmp_path, "--train.seq_len=128") != first
    assert len(counted) == 6
    monkeypatch.setattr(captures, "_digest_of_code", lambda: "other")
    check_alike(work_of(tmp_path), first)
    assert len(counted) == 9


def test_a_damaged_file_is_as_none_and_a_folder_that_cannot_be_written_costs_only_the_time(
    tmp_path: Path,
) -> None:
    work = next(iter(work_of(tmp_path / "other").values()))
    job = parse_config(TINY).job
    ((case, _), *_) = cases_of(job.model, plan_run(job, 4), 64, frozenset(), False)
    remember(tmp_path / "works", case, lambda: work)
    (path,) = (tmp_path / "works").iterdir()
    intact = path.read_bytes()
    for damage in (b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"parameters": 3}', intact[:-20]):
        path.write_bytes(damage)
        traced: list[ModuleWorkload] = []
        assert remember(tmp_path / "works", case, lambda: traced.append(work) or work) is work, damage  # noqa: B023
        assert traced, damage
        assert path.read_bytes() == intact, damage
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("\0")):
        assert remember(folder, case, lambda: work) is work
    assert sorted(child.name for child in tmp_path.iterdir()) == ["file", "other", "works"]
