"""Reports of checks on two ranks and on one process, several subjects at once."""

import pickle
from collections.abc import Callable, Iterable
from typing import Any

from meshwright.parallel.check.compare import compare_recorded
from meshwright.parallel.check.foreign import record_rank, record_twin
from meshwright.parallel.check.recorded import RankRecord
from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.check.subject import Subject
from tests.support.worlds import run_ranks

# a function at module level, because many a subject cannot be pickled
Subjects = Callable[..., Iterable[tuple[str, Subject]]]


def reports_of(subjects: Subjects, *arguments: Any) -> dict[str, CheckReport]:
    """Return the report on each of `subjects(*arguments)`, by name."""
    ranks = pickle.dumps(run_ranks(2, _record, subjects, arguments))  # as bytes, not an open file a tensor
    return dict(run_ranks(1, _compare, subjects, arguments, ranks)[0])


def _record(subjects: Subjects, arguments: tuple[Any, ...]) -> dict[str, RankRecord]:
    return {name: record_rank(subject) for name, subject in subjects(*arguments)}


def _compare(subjects: Subjects, arguments: tuple[Any, ...], ranks: bytes) -> dict[str, CheckReport]:
    recorded, found = pickle.loads(ranks), {}
    for name, subject in subjects(*arguments):
        of_subject = [rank[name] for rank in recorded]
        found[name] = compare_recorded(subject.mesh, record_twin(subject, of_subject), of_subject)
    return found
