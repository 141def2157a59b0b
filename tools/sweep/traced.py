"""What a profile of a run says in one figure."""

from functools import cache
from pathlib import Path

from meshwright.tools.trace.answer import answer
from meshwright.tools.trace.find import find_traces
from meshwright.train.errors import USER_ERRORS

EXPOSED = "exposed"  # of tools.trace.shares.KINDS


def read_exposed(folder: Path) -> float | None:
    """Share of the median profiled step in which computing waits for communication, on the run's first
    profiled rank; None where nothing was profiled, or the trace cannot be read."""
    profiles = list((folder / "profile").rglob("*.json*"))
    return _read(folder, max(path.stat().st_mtime for path in profiles)) if profiles else None


@cache
def _read(folder: Path, changed_s: float) -> float | None:
    """Once for each profile: a large trace takes its time."""
    try:
        traces = find_traces(folder, None)
        first = next(iter(traces))
        return answer({first: traces[first]}, first).shares.of_step()[EXPOSED]
    except USER_ERRORS:
        return None
