"""Check refutes each fault of the gallery, also in one tensor of many, and passes the sharding without it."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.check.compare import compare_recorded
from meshwright.parallel.check.foreign import record_rank, record_twin
from meshwright.parallel.check.report import CheckReport
from tests.gallery.faults import FAULTS, Fault
from tests.support.worlds import run_ranks


def record(number: int, folder: Path) -> None:
    """Record the cases of a fault on this rank."""
    for name, subject in FAULTS[number].subjects(folder):
        torch.save(record_rank(subject), folder / f"{name}.{dist.get_rank()}.pt")


def compare(number: int, folder: Path) -> dict[str, CheckReport]:
    """Compare the cases of a fault with their twins, on one process."""
    found = {}
    for name, subject in FAULTS[number].subjects(folder):
        ranks = [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)]
        found[name] = compare_recorded(subject.mesh, record_twin(subject, ranks), ranks)
    return found


def first_line(report: CheckReport) -> str:
    """Return what a report says of the tensor that it names first; "" if all are the same."""
    return next((line.strip() for line in str(report).splitlines() if line.startswith("  ")), "")


def reports_of(fault: Fault, folder: Path) -> dict[str, CheckReport]:
    """Return the reports on "right", "wrong" and "one"."""
    number = FAULTS.index(fault)
    run_ranks(2, record, number, folder)
    (found,) = run_ranks(1, compare, number, folder)
    return dict(found)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_the_fault_is_caught_and_named(fault: Fault, tmp_path: Path) -> None:
    found = reports_of(fault, tmp_path)
    assert found["right"].same, str(found["right"])
    assert re.search(fault.says, first_line(found["wrong"])), str(found["wrong"])
    assert re.search(fault.one_says or fault.says, first_line(found["one"])), str(found["one"])
