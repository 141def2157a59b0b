"""Check refutes each fault of the gallery, also in one tensor of many, and passes the sharding without it."""

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


def reports_of(fault: Fault, folder: Path) -> dict[str, CheckReport]:
    """Return the reports on "right" and "wrong", and on "one" if the fault can be in one tensor."""
    number = FAULTS.index(fault)
    run_ranks(2, record, number, folder)
    (found,) = run_ranks(1, compare, number, folder)
    return dict(found)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_the_fault_is_caught_and_named(fault: Fault, tmp_path: Path) -> None:
    found = reports_of(fault, tmp_path)
    assert found["right"].same, str(found["right"])
    assert not found["wrong"].same
    assert fault.says in str(found["wrong"])
    assert ("one" in found) == (fault.one is not None)
    assert not ("one" in found and found["one"].same)
