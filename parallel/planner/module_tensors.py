"""The tensors that a module's forward and backward allocate and free, in order; and the blocks whose tensors
need not be logged one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm, prod

from meshwright.parallel.plan.schema import Plan, UnitPlan
from meshwright.parallel.planner.allocator import AllocationLog
from meshwright.parallel.planner.workload import Buffer, Linear, ModelWorkload, ModuleWorkload, total

PASSING = "passing"  # the group of the hidden states between two modules, or of their gradient
RESULT = "result"  # the group of what becomes PASSING at the module's end
MOST_PIECES = 256  # of the activations of a module that was traced eagerly
EDGE = 2  # blocks at each end of a row of equal blocks whose tensors are logged one by one


@dataclass(frozen=True)
class _Change:
    """A buffer of a module that is allocated or freed. `saved`: the backward uses it too."""

    number: int
    role: str
    size: int
    allocates: bool
    saved: bool


class ModuleTensors:
    """Writes the tensors of modules' forwards and backwards into a log; all are on the compute stream."""

    def __init__(self, log: AllocationLog, work: ModelWorkload, micro_batch_size: int) -> None:
        self._log, self._work, self._sequences = log, work, micro_batch_size
        self._names = list(work.modules)
        self._largest_output = max(module.output.at(micro_batch_size) for module in work.modules.values())
        self._changes: dict[tuple[int, int], tuple[list[_Change], list[_Change]]] = {}

    def forward(self, name: str) -> None:
        """Run a module's forward. Without a backward it keeps no tensor but its result."""
        log = self._log
        if log.muted:
            return
        for change in self._changes_of(name)[0]:
            group = (name, change.number)
            if change.role == "input":
                if change.allocates and change.saved:
                    log.move(PASSING, group)
            elif change.allocates:
                log.hold("compute", RESULT if change.role == "output" else group, change.size)
            elif change.role != "output":
                log.drop(group)
        log.drop(PASSING)
        log.move(RESULT, PASSING)
        if not self._work.has_backward((name,)):
            self.release(name)

    def release(self, name: str) -> None:
        """Free the tensors that a module has saved for its backward."""
        self._log.drop(*((name, change.number) for change in self._saved(name)))

    def restore(self, name: str) -> None:
        """Allocate the tensors that a module has saved for its backward again."""
        for change in self._saved(name):
            self._log.hold("compute", (name, change.number), change.size)

    def backward(self, name: str, weight_gradients: str) -> None:
        """Run a module's backward. `weight_gradients`: the group of the gradients of its weights."""
        log = self._log
        if log.muted:
            return
        groups = {"weight_grad": weight_gradients, "input_grad": RESULT, "output_grad": PASSING}
        for change in self._changes_of(name)[1]:
            group = groups.get(change.role, (name, change.number))
            if change.allocates:
                log.hold("compute", group, change.size)
            elif change.saved and change.role in groups:  # a gradient that the forward has computed
                log.move((name, change.number), group)
            elif group not in (weight_gradients, RESULT):
                log.drop(group)
        log.drop(PASSING)
        log.move(RESULT, PASSING)

    def _saved(self, name: str) -> list[_Change]:
        return [change for change in self._changes_of(name)[0] if change.allocates and change.saved]

    def _changes_of(self, name: str) -> tuple[list[_Change], list[_Change]]:
        """Return the changes in a module's forward and in its backward, in order."""
        module, position = self._work.modules[name], self._names.index(name)
        given = self._work.modules[self._names[position - 1]].output if position else Linear()
        if (key := (id(module), int(given.at(self._sequences)))) not in self._changes:
            buffers = module.buffers or _estimate_buffers(
                module, given, self._sequences, self._largest_output
            )
            self._changes[key] = _changes(buffers, self._sequences)
        return self._changes[key]


def _changes(buffers: Sequence[Buffer], sequences: int) -> tuple[list[_Change], list[_Change]]:
    timed = []
    for number, buffer in enumerate(buffers):
        saved = buffer.begin < 0 <= buffer.end
        size = int(buffer.size.at(sequences))
        if buffer.role != "output_grad":  # the next module's backward has allocated it
            timed.append((buffer.begin, 0, number, _Change(number, buffer.role, size, True, saved)))
        timed.append((buffer.end, 1, number, _Change(number, buffer.role, size, False, saved)))
    in_order = sorted(timed, key=lambda entry: entry[:3])
    forward = [change for time, *_, change in in_order if time < 0]
    return forward, [change for *_, change in in_order[len(forward) :]]


def _estimate_buffers(
    module: ModuleWorkload, given: Linear, sequences: int, piece: float
) -> tuple[Buffer, ...]:
    """Return the buffers of a module that was traced eagerly: of activations only the sum is known, so they
    are in pieces of the size of a hidden state.

    Args:
        given: bytes of the module's input
        piece: bytes of a hidden state
    """

    def pieces(size: Linear) -> list[Linear]:
        amount = max(0.0, size.per_sequence * sequences)
        each = max(piece, amount / MOST_PIECES, 1.0)
        count, rest = divmod(amount, each)
        return [Linear(part) for part in (max(0.0, size.fixed), *[each] * int(count), rest) if part]

    def peak(moments: Sequence[Linear], *others: Linear) -> list[Linear]:
        largest = max(moments, key=lambda moment: moment.at(sequences), default=Linear())
        return pieces(total((largest, *(other.times(-1) for other in others))))

    saves_input = module.saved_bytes.at(sequences) >= given.at(sequences)
    saved = total((module.saved_bytes, given.times(-1))) if saves_input else module.saved_bytes
    gradients = max((moment.fixed for moment in module.backward.live_bytes), default=0.0)
    weights = list(map(prod, module.weights)) or [1]
    # a module without parameters of its own, such as an embedding with tied weights, adds to a gradient
    role, end = ("weight_grad", 4) if module.parameters else ("inner", 3)
    return (
        Buffer("input", given, -3, 2 if saves_input else -1),
        *(Buffer("inner", size, -2, 2) for size in pieces(saved)),
        Buffer("output", module.output, -2, -1),
        *(
            Buffer("inner", size, -1, -1)
            for size in peak(module.forward.live_bytes, given, saved, module.output)
        ),
        Buffer("output_grad", module.output, 0, 3),
        *(
            Buffer("inner", size, 1, 1)
            for size in peak(module.backward.live_bytes, module.saved_bytes, module.output)
        ),
        *(Buffer(role, Linear(gradients * weight / sum(weights)), 3, end) for weight in weights),  # type: ignore[arg-type]
        Buffer("input_grad", given, 3, 4),
    )


def repeated_blocks(plan: Plan, work: ModelWorkload) -> dict[str, int]:
    """Return the blocks that repeat those before and after them, with their number in such a row, except EDGE
    blocks at each end: the pools of a model of 126 equal blocks grow by the same bytes for each of them.

    All-gathers use their buffers in turn, so the number is a multiple of the number of buffers.
    """

    def kind(unit: UnitPlan) -> tuple[UnitPlan, int, float]:
        name = unit.modules[0]
        return replace(unit, modules=()), id(work.modules[name]), work.trained.get(name, 1.0)

    repeated: dict[str, int] = {}
    for (settings, *_), row in groupby((unit for unit in plan.units if len(unit.modules) == 1), kind):
        forward, backward = (
            prefetch if isinstance(prefetch, int) else len(plan.units)
            for prefetch in (settings.forward_prefetch, settings.backward_prefetch)
        )
        names, edge = [unit.name for unit in row], EDGE + max(forward, backward)
        inner = max(0, len(names) - 2 * edge)
        count = inner - inner % lcm(forward + 1, max(1, backward))
        repeated |= dict.fromkeys(names[edge : edge + count], count)
    return repeated
