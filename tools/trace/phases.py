"""The place of a CPU thread in the step at a given time (unit, phase, micro batch), and the owner of a
collective: FSDP2 or tensor parallelism, and the mesh axis."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.parallel.planner.timeline import AXIS_OF_LANE
from meshwright.tools.trace.events import MESH, ROOT_END, WORK_OF, Label, TraceEvents


class StepPhase(NamedTuple):
    """A place in the step. `kind`: the innermost label's, "" outside all labels; `work`: kind of compute
    there; `unit`: the label's, or that of the last one in the same phase. The fields from `work` on are
    those of ComputeSpan, from `unit` on those of UnitDeadline."""

    kind: str
    work: str
    unit: str
    phase: str
    micro_batch: int


class Places:
    """Look up places for all threads with labels; `labels` are in the order of their starts."""

    def __init__(self, steps: Sequence[tuple[int, int, int]], labels: Sequence[Label]) -> None:
        threads = defaultdict[int, list[Label]](list)
        for label in labels:
            threads[label.thread].append(label)
        self._phases = [change for step in steps for change in _phase_changes(step, labels)]
        self._segments = {thread: list(_segments(own)) for thread, own in threads.items()}
        self._hooks = {
            thread: [label for label in own if label.kind in ("pre_forward", "pre_backward")]
            for thread, own in threads.items()
        }

    @property
    def threads(self) -> set[int]:
        """The threads with labels."""
        return set(self._segments)

    def hook(self, thread: int, time_ns: int) -> str:
        """Return the unit whose turn it is: whose hook of FSDP2 before forward or backward was the last."""
        hooks = self._hooks.get(thread, [])
        index = bisect_right(hooks, time_ns, key=lambda label: label.start_ns) - 1
        return hooks[index].unit if index >= 0 else ""

    def at(self, thread: int, time_ns: int) -> StepPhase:
        """Return the place of a thread at a time."""
        index = bisect_right(self._phases, time_ns, key=itemgetter(0)) - 1
        since_ns, phase, micro_batch = self._phases[max(index, 0)] if self._phases else (0, "forward", 0)
        kind, unit, named_ns = "", "", 0
        segments = self._segments.get(thread, [])
        if (i := bisect_right(segments, time_ns, key=itemgetter(0)) - 1) >= 0:
            _, kind, unit, named_ns = segments[i]
        if named_ns <= since_ns:
            unit = ""
        if kind == "optimizer" or phase == "optimizer":
            unit, phase = "", "optimizer"
        return StepPhase(kind, WORK_OF.get(kind, phase), unit, phase, micro_batch)


def _phase_changes(step: tuple[int, int, int], labels: Sequence[Label]) -> Iterator[tuple[int, str, int]]:
    """Yield each phase change: time, phase, micro batch. Forward labels in the backward are its recompute."""
    _, start_ns, end_ns = step
    phase, micro_batch, over_ns = "forward", 0, start_ns
    yield start_ns, phase, micro_batch
    for label in labels:
        if not start_ns <= label.start_ns < end_ns:
            continue
        if phase == "forward" and "backward" in label.kind:
            phase = "backward"
            yield label.start_ns, phase, micro_batch
        elif phase == "backward" and label.kind == ROOT_END:
            phase, over_ns = "between", label.end_ns
        elif phase == "between" and "forward" in label.kind:
            phase, micro_batch = "forward", micro_batch + 1
            yield over_ns, phase, micro_batch
    if phase == "between":
        yield over_ns, "optimizer", micro_batch


def _segments(labels: Sequence[Label]) -> Iterator[tuple[int, str, str, int]]:
    """Yield segments, each until the next: start, kind of the innermost label, unit, and end of the label
    that names the unit. The innermost label is the open one that started last; the unit is that of the
    innermost label with a unit, or else of the last such label."""
    marks = [(label.end_ns, 0, i) for i, label in enumerate(labels)]
    marks += [(label.start_ns, 1, i) for i, label in enumerate(labels)]
    opened, unit, named_ns = list[int](), "", 0
    for time_ns, begins, i in sorted(marks):
        if begins:
            opened.append(i)
        elif i in opened:  # a label without duration ends before it starts
            opened.remove(i)
        inner = labels[opened[-1]] if opened else None
        if named := next((labels[j] for j in reversed(opened) if labels[j].unit), None):
            unit, named_ns = named.unit, named.end_ns
        yield time_ns, inner.kind if inner else "", unit, named_ns


# labels in which FSDP2 launches its collectives
FSDP_LAUNCHES = frozenset({"all_gather", "post_backward_reduce"})


def find_lane(collective: str, axis: str) -> str:
    """Return the lane of a collective on an axis."""
    if axis in ("tp", "cp"):
        return axis
    return collective if collective in ("all_gather", "reduce_scatter", "all_to_all") else "all_reduce"


def find_axis(collective: str, place: StepPhase, mesh: MeshPlan | None) -> str:
    """Return the mesh axis of a collective, by the label in which it was launched; "" if it belongs to no
    known axis, such as the all-reduces of the token count and the gradient norm before and after all units.

    Args:
        mesh: the run's mesh; None if not known

    FSDP2 launches collectives only in labels of its own. Any other collective in a forward or backward
    belongs to tensor or context parallelism, if the run uses it: with both to context parallelism if it is an
    all-to-all, which tensor parallelism never uses, and otherwise to tensor parallelism.
    """
    if place.kind in FSDP_LAUNCHES:
        axis = AXIS_OF_LANE[find_lane(collective, "")]
        replicates = place.kind == "post_backward_reduce" and (mesh is None or mesh.dp_replicate > 1)
        return axis if axis != "dp_replicate" or replicates else ""
    if place.phase == "optimizer" or place.kind == ROOT_END:
        return ""
    used = [axis for axis in ("tp", "cp") if mesh is None or getattr(mesh, axis) > 1]
    inside = place.kind in ("forward", "backward") if mesh is None else bool(place.unit)
    if not inside or not used:
        return ""
    return "cp" if collective == "all_to_all" else used[0]


def group_axes(store: TraceEvents) -> dict[str, str]:
    """Return the mesh axis by the name of its process group; empty if the trace lists no groups (only traces
    with NCCL list them)."""
    groups = (store.header.get("distributedInfo") or {}).get("pg_config") or []
    return {
        str(group.get("pg_name", "")): str(group["pg_desc"]).removeprefix(MESH)
        for group in groups
        if str(group.get("pg_desc", "")).startswith(MESH)
    }
