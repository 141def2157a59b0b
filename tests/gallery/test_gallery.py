"""Check refutes each fault of the gallery, also in one tensor of many, and passes the sharding without it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.check.subject import Subject
from tests.gallery.faults import FAULTS, Fault
from tests.support.checks import reports_of


def first_line(report: CheckReport) -> str:
    """Return what a report says of the tensor that it names first; "" if all are the same."""
    return next((line.strip() for line in str(report).splitlines() if line.startswith("  ")), "")


def subjects(number: int, folder: Path) -> Iterator[tuple[str, Subject]]:
    return FAULTS[number].subjects(folder)


def reports_on(fault: Fault, folder: Path) -> dict[str, CheckReport]:
    """Return the reports on "right", "wrong" and "one"."""
    return reports_of(subjects, FAULTS.index(fault), folder)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_the_fault_is_caught_and_named(fault: Fault, tmp_path: Path) -> None:
    found = reports_on(fault, tmp_path)
    assert found["right"].same, str(found["right"])
    assert re.search(fault.says, first_line(found["wrong"])), str(found["wrong"])
    assert re.search(fault.one_says or fault.says, first_line(found["one"])), str(found["one"])
