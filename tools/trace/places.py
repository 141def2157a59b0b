"""Where in the step a CPU thread was at a time: at which unit's work, in which phase of which micro batch."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.tools.trace.labels import BACKWARD_KINDS, FORWARD_KINDS, ROOT_END, WORK_OF, Label


@dataclass(frozen=True, slots=True)
class Place:
    """`kind`: of the innermost label, "" outside all; `work`: what computing there is; `unit`: of the label,
    or of the one before it in the same phase."""

    kind: str
    work: str
    unit: str
    phase: str
    micro_batch: int


class Places:
    """Of all threads that carry labels."""

    def __init__(self, steps: Sequence[tuple[int, int, int]], labels: Sequence[Label]) -> None:
        ordered = sorted(labels, key=lambda label: label.start_ns)
        self._phases = [change for step in steps for change in _phase_changes(step, ordered)]
        self._phase_starts = [change[0] for change in self._phases]
        self._segments = {thread: list(_segments(own)) for thread, own in _by_thread(ordered).items()}
        self._hooks = {
            thread: [label for label in own if label.kind in ("pre_forward", "pre_backward")]
            for thread, own in _by_thread(ordered).items()
        }
        self._starts = {
            thread: [segment[0] for segment in segments] for thread, segments in self._segments.items()
        }

    @property
    def threads(self) -> set[int]:
        """Those that carry labels."""
        return set(self._segments)

    def hook(self, thread: int, time_ns: int) -> str:
        """The unit whose turn it is: the last one that FSDP2's hook before its forward or backward was called
        for."""
        hooks = self._hooks.get(thread, [])
        found = bisect_right(hooks, time_ns, key=lambda label: label.start_ns) - 1
        return hooks[found].unit if found >= 0 else ""

    def at(self, thread: int, time_ns: int) -> Place:
        """The place of a thread at a time."""
        found = bisect_right(self._phase_starts, time_ns) - 1
        since_ns, phase, micro_batch = self._phases[max(found, 0)] if self._phases else (0, "forward", 0)
        kind, unit, named_ns = "", "", 0
        if thread in self._segments and (i := bisect_right(self._starts[thread], time_ns) - 1) >= 0:
            _, kind, unit, named_ns = self._segments[thread][i]
        if named_ns <= since_ns:
            unit = ""
        if kind == "optimizer" or phase == "optimizer":
            unit, phase = "", "optimizer"
        return Place(kind, WORK_OF.get(kind, phase), unit, phase, micro_batch)


def _by_thread(labels: Sequence[Label]) -> dict[int, list[Label]]:
    threads = defaultdict[int, list[Label]](list)
    for label in labels:
        threads[label.thread].append(label)
    return threads


def _phase_changes(step: tuple[int, int, int], labels: Sequence[Label]) -> Iterator[tuple[int, str, int]]:
    """Time, phase and micro batch that begin then. Labels of the forward in a backward are of its
    recomputation."""
    _, start_ns, end_ns = step
    phase, micro_batch, over_ns = "forward", 0, start_ns
    yield start_ns, phase, micro_batch
    for label in labels:
        if not start_ns <= label.start_ns < end_ns:
            continue
        if phase == "forward" and label.kind in BACKWARD_KINDS:
            phase = "backward"
            yield label.start_ns, phase, micro_batch
        elif phase == "backward" and label.kind == ROOT_END:
            phase, over_ns = "between", label.end_ns
        elif phase == "between" and label.kind in FORWARD_KINDS:
            phase, micro_batch = "forward", micro_batch + 1
            yield over_ns, phase, micro_batch
    if phase == "between":
        yield over_ns, "optimizer", micro_batch


def _segments(labels: Sequence[Label]) -> Iterator[tuple[int, str, str, int]]:
    """Start, kind of the innermost label, unit, and until when a label says so, each until the next. The
    innermost is the last one begun of those open; the unit is that of the innermost that has one, or the last
    one that had."""
    marks = [(label.end_ns, 0, i) for i, label in enumerate(labels)] + [
        (label.start_ns, 1, i) for i, label in enumerate(labels)
    ]
    opened, unit, named_ns = list[int](), "", 0
    for time_ns, begins, i in sorted(marks):
        if begins:
            opened.append(i)
        elif i in opened:  # one of no length ends before it begins
            opened.remove(i)
        inner = labels[opened[-1]] if opened else None
        if named := next((labels[j] for j in reversed(opened) if labels[j].unit), None):
            unit, named_ns = named.unit, named.end_ns
        yield time_ns, inner.kind if inner else "", unit, named_ns
