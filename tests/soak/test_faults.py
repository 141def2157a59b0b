"""The program of tests/soak/faults without its runs of pytest; it is started by hand."""

import itertools
from pathlib import Path

from tests.soak.faults.__main__ import FAULTS, ROOT
from tests.soak.faults.order import order_tests
from tests.soak.faults.source import find_places, put_in


def test_every_fault_can_be_put_in_and_removed(tmp_path: Path) -> None:
    """A change of the product that a snippet quotes must change the snippet too."""
    places = find_places(ROOT, FAULTS)
    assert len(places) == len(FAULTS) >= 60
    fault, place = FAULTS[0], places[FAULTS[0].name]
    copy = tmp_path / place.path
    copy.parent.mkdir(parents=True)
    original = (ROOT / place.path).read_text()
    copy.write_text(original)
    with put_in(tmp_path, fault, place, tmp_path / "undo"):
        assert fault.becomes in copy.read_text() != original
    assert copy.read_text() == original


def test_the_test_that_caught_a_fault_last_is_tried_first_then_those_of_its_module() -> None:
    last = "tests/models/test_loss.py::test_a[1]"
    first, cases, about, *_ = itertools.islice(order_tests(Path("models/b/hf.py"), last), 3)
    assert (first, cases) == ([last], ["tests/models/test_loss.py::test_a"])
    assert about == ["tests/models/test_loss.py", "tests/models/test_hf.py"]
