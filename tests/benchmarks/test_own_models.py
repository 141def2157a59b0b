"""The zoo of other people's models: its rows are right, and its table is that of the docs."""

import importlib.util
import json
import os

import pytest

from benchmarks.own_models import markdown
from benchmarks.support.harness import RECORDS
from benchmarks.zoo.models import CASES
from tests.support.forks import ROOT
from tests.support.nested import run_nested

PARTS = 12  # of all models, one a day
LIBRARIES = ("torchvision", "timm")


def record() -> dict[str, dict[str, object]]:
    """The rows of the newest record, by model."""
    newest = sorted(RECORDS.glob("*-own-models.json"))[-1]
    return {row["model"]: row for row in json.loads(newest.read_text())["figures"]["rows"]}


def test_the_table_of_the_docs_is_that_of_the_newest_record() -> None:
    rows = record()
    assert list(rows) == list(CASES)
    assert markdown(list(rows.values())) in (ROOT / "docs/your-model.md").read_text()


def of_the_day() -> list[str]:
    """A part of the models whose libraries are installed."""
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    missing = tuple(name for name in LIBRARIES if importlib.util.find_spec(name) is None)
    known = [name for name in CASES if not name.startswith(missing)]
    return known if seed == "all" else known[int(seed) % PARTS :: PARTS]


@pytest.mark.slow
@pytest.mark.sampled(3)
def test_a_row_is_what_the_record_has() -> None:
    done = run_nested("benchmarks.own_models", *of_the_day(), "--json")
    assert done.returncode == 0, done.stderr
    rows, recorded = json.loads(done.stdout)["figures"]["rows"], record()
    assert [row["model"] for row in rows] == of_the_day()
    for row in rows:
        expected = recorded[row["model"]]
        assert (row["right"], row["refused"]) == (expected["right"], expected["refused"]), row
        assert row["columns"].keys() == expected["columns"].keys()
