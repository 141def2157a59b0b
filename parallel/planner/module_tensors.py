"""The tensors that a module's forward and backward allocate and free, in order."""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from meshwright.parallel.planner.ledger import Ledger
from meshwright.parallel.planner.workload import Buffer, Linear, ModelWorkload, ModuleWorkload, total

PASSING = "passing"  # the group of the hidden states between two modules, or of their gradient
RESULT = "result"  # the group of what becomes PASSING at the module's end
MOST_PIECES = 256  # of the activations of a module that was traced eagerly


class _Change(NamedTuple):
    """A buffer of a module that is allocated or freed. `saved`: the backward uses it too."""

    number: int
    role: str
    size: int
    frees: bool
    saved: bool


class ModuleTensors:
    """Writes the tensors of modules' forwards and backwards into a ledger; all are on the compute stream."""

    def __init__(self, ledger: Ledger, work: ModelWorkload, micro_batch_size: int) -> None:
        self._ledger, self._work, self._sequences = ledger, work, micro_batch_size
        self._given = {after: work.modules[name].output for name, after in pairwise(work.modules)}
        self._largest_output = max(module.output.at(micro_batch_size) for module in work.modules.values())
        self._changes: dict[tuple[int, int], tuple[list[_Change], list[_Change]]] = {}

    def given(self, name: str) -> Linear:
        """Return the bytes of a module's input, the output of the module before."""
        return self._given.get(name, Linear())

    def forward(self, name: str) -> None:
        """Run a module's forward. Without a backward it keeps no tensor but its result."""
        ledger = self._ledger
        for change in self._changes_of(name)[0]:
            group = (name, change.number)
            if change.role == "input":
                if change.saved:
                    ledger.move(PASSING, group)
            elif not change.frees:
                ledger.hold("compute", RESULT if change.role == "output" else group, change.size)
            elif change.role != "output":
                ledger.drop(group)
        ledger.drop(PASSING)
        ledger.move(RESULT, PASSING)
        if not self._work.has_backward((name,)):
            self.release(name)

    def release(self, name: str) -> None:
        """Free the tensors that a module has saved for its backward."""
        self._ledger.drop(*((name, change.number) for change in self._saved(name)))

    def restore(self, name: str) -> None:
        """Allocate the tensors that a module has saved for its backward again."""
        for change in self._saved(name):
            self._ledger.hold("compute", (name, change.number), change.size)

    def backward(self, name: str, weight_gradients: Hashable) -> None:
        """Run a module's backward. `weight_gradients`: the group of the gradients of its weights."""
        ledger = self._ledger
        groups = {"weight_grad": weight_gradients, "input_grad": RESULT, "output_grad": PASSING}
        for change in self._changes_of(name)[1]:
            group = groups.get(change.role, (name, change.number))
            if not change.frees:
                ledger.hold("compute", group, change.size)
            elif change.saved and change.role in groups:  # a gradient that the forward has computed
                ledger.move((name, change.number), group)
            elif group not in (weight_gradients, RESULT):
                ledger.drop(group)
        ledger.drop(PASSING)
        ledger.move(RESULT, PASSING)

    def _saved(self, name: str) -> list[_Change]:
        return [change for change in self._changes_of(name)[0] if change.saved and not change.frees]

    def _changes_of(self, name: str) -> tuple[list[_Change], list[_Change]]:
        """Return the changes in a module's forward and in its backward, in order."""
        module, given = self._work.modules[name], self.given(name)
        if (key := (id(module), int(given.at(self._sequences)))) not in self._changes:
            buffers = module.buffers or _estimate_buffers(
                module, given, self._sequences, self._largest_output
            )
            self._changes[key] = _changes(buffers, self._sequences)
        return self._changes[key]


def _changes(buffers: Sequence[Buffer], sequences: int) -> tuple[list[_Change], list[_Change]]:
    timed = [
        (time, frees, number, buffer.begin < 0 <= buffer.end)
        for number, buffer in enumerate(buffers)
        for frees, time in ((False, buffer.begin), (True, buffer.end))
        if frees or buffer.role != "output_grad"  # the next module's backward has allocated it
    ]
    phases: tuple[list[_Change], list[_Change]] = ([], [])
    for time, frees, number, saved in sorted(timed):
        role, size = buffers[number].role, int(buffers[number].size.at(sequences))
        phases[time >= 0].append(_Change(number, role, size, frees, saved))
    return phases


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
