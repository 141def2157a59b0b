"""Check refutes every fault of the gallery, also in one tensor of many, and passes the shardings without."""

from pathlib import Path

import pytest
import torch

from meshwright.parallel.check.compare import compare_recorded
from meshwright.parallel.check.foreign import record_rank, record_twin
from meshwright.parallel.check.report import CheckReport
from tests.gallery.faults import FAULTS
from tests.support.worlds import run_ranks

Key = tuple[str, str]  # of a case: where the fault was, and "right", "wrong" or "one"


def record_ranks(folder: Path) -> None:
    """Record all cases on this rank."""
    for fault in FAULTS:
        for name, subject in fault.subjects(folder):
            torch.save(
                record_rank(subject), file_of(folder, (fault.where, name), torch.distributed.get_rank())
            )


def file_of(folder: Path, key: Key, rank: int) -> Path:
    return folder / f"{'-'.join(key).replace(' ', '-')}.{rank}.pt"


def compare_all(folder: Path) -> dict[Key, CheckReport]:
    """Compare all cases with their twins, on one process."""
    found = {}
    for fault in FAULTS:
        for name, subject in fault.subjects(folder):
            files = [file_of(folder, (fault.where, name), rank) for rank in range(2)]
            ranks = [torch.load(file, weights_only=False) for file in files]
            found[fault.where, name] = compare_recorded(subject.mesh, record_twin(subject, ranks), ranks)
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, CheckReport]:
    folder = tmp_path_factory.mktemp("gallery")
    run_ranks(2, record_ranks, folder)
    (found,) = run_ranks(1, compare_all, folder)
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_the_fault_is_caught_and_named(fault, reports: dict[Key, CheckReport]) -> None:
    right, wrong = reports[fault.where, "right"], reports[fault.where, "wrong"]
    assert right.same, str(right)
    assert not wrong.same and fault.says in str(wrong), str(wrong)
    if fault.one is not None:
        one = reports[fault.where, "one"]
        assert not one.same and len(one.differences) <= len(wrong.differences), str(one)
