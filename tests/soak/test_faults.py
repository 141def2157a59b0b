"""The programs of tests/soak/faults without their processes; the programs are run by hand."""

import json
from pathlib import Path

from tests.soak.faults.__main__ import FAULTS, RECORDS, ROOT
from tests.soak.faults.lines import lost_lines, numbers, to_words
from tests.soak.faults.record import Outcome, Record, read_record, to_table
from tests.soak.faults.source import find_places


def test_every_fault_can_be_put_in() -> None:
    """A change of the product that a snippet quotes must change the snippet too."""
    assert len(find_places(ROOT, FAULTS)) == len(FAULTS) >= 60


def test_an_outcome_keeps_the_commit_that_it_is_of(tmp_path: Path) -> None:
    before = json.loads((RECORDS / "before.json").read_text())
    assert {outcome.commit for outcome in read_record(RECORDS / "before.json", "new").faults.values()} == {
        before["commit"]
    }
    caught = {
        name: Outcome(True, "tests/test_a.py::test_a", "call: E", 1.0, 1, commit)
        for name, commit in (("kept", "old"), ("again", "new"))
    }
    Record(tmp_path / "record.json", "new", caught).write()
    record = read_record(tmp_path / "record.json", "newest")
    assert {name: outcome.commit for name, outcome in record.faults.items()} == {
        "kept": "old",
        "again": "new",
    }
    shown = to_table(read_record(tmp_path / "record.json", "")).splitlines()
    assert [line.endswith("(at old)") for line in shown] == [True, False, False]


def test_lines_that_lost_their_last_test_are_found_where_they_stand_now() -> None:
    was = ["a = 1", "if a:", "    b = 2", "    c = 3", "d = 4"]
    is_now = ["# new", "a = 1", "if a:", "    b = 2", "    c = 33", "d = 4"]
    assert lost_lines(was, is_now, missing_then=[3], missing_now=[4, 5, 6]) == [6]
    assert lost_lines(was, was, missing_then=[3], missing_now=[3]) == []
    assert numbers(to_words([54, 66, 67, 68, 70, 71])) == [54, 66, 67, 68, 70, 71]
    assert (to_words([54, 66, 67]), to_words([]), numbers("")) == ("54, 66-67", "", [])
