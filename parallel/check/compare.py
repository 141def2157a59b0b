"""Compares what the ranks of a check recorded with what their twin did, moment by moment."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from meshwright.parallel.check.kinds import (
    NARROW,
    TOLERANCE,
    Place,
    floor_of,
    kind,
    places_of_slices,
    relative_error,
)
from meshwright.parallel.check.recorded import START, RankRecord, Seen, data_rank, groups_over
from meshwright.parallel.check.report import CheckReport, Mismatch
from meshwright.parallel.check.updates import kind_of_update, rounding_of
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import MeshPlan


@dataclass(frozen=True)
class Comparison:
    """What the ranks have, beside their twin.

    Args:
        tolerance: of a relative difference
    """

    mesh: MeshPlan
    twin: RankRecord
    ranks: Sequence[RankRecord]
    tolerance: float

    def report(self) -> CheckReport:
        """Return what differs, up to the first moment at which something does. Raises PlanError if nothing
        differs because nothing was trained."""
        compared, largest, differences, notes = 0, 0.0, [*self._frozen()], list[str]()
        for moment in dict.fromkeys(seen.moment for seen in self.ranks[0].tensors):
            floor = self.twin.factor * floor_of(self.twin.of(moment, "gradient").values())
            for seen in self._at(moment):
                found = self._of_tensor(seen, floor if seen.what == "gradient" else 0.0)
                if isinstance(found, str):
                    notes.append(found)
                    continue
                compared, largest = compared + 1, max(largest, found.error)
                if not found.error <= self._tolerance(seen):
                    differences.append(found)
            if differences:
                break
        of_twin = ((seen, t) for seen, t in self.twin.tensors.items() if seen.what == "change")
        changes = [t for seen, t in of_twin if seen.name not in self.twin.frozen]
        if changes and not differences and not any(t is not None and bool(t.any()) for t in changes):
            raise PlanError("check: no step changed any parameter: does step(batches) step an optimizer?")
        return CheckReport(
            degrees=self.mesh,
            blocks=(),
            compared=compared,
            largest=largest,
            differences=tuple(differences),
            graphs=0,
            not_run=tuple(dict.fromkeys((*self.ranks[0].notes, *notes))),
            hints=tuple(self._hints(differences)),
        )

    def _hints(self, differences: Sequence[Mismatch]) -> Iterator[str]:
        if abs((factor := self.twin.factor) - 1) > TOLERANCE:
            yield f"gradients are {factor:.3g} times the sum over data-parallel ranks and micro batches"
        if self.mesh.world_size > 1 and not self._slices and all(rank.whole for rank in self.ranks):
            yield "nothing is sharded: every rank holds every parameter whole"
        if self.twin.rule:
            yield self.twin.rule
        if differences and self.ranks[0].hint:
            yield self.ranks[0].hint
        if len(differences) > 1 and not any(each.kind for each in differences) and not self.twin.parts:
            yield "no factor in common: does the loss weigh rows otherwise, as a mean over each rank does?"
        computed = all(each.name.startswith(("output", "gradient")) for each in differences)
        if differences and computed and all(TOLERANCE < each.error < NARROW for each in differences):
            yield f"a narrower dtype? Shard in float32 to know, or allow its rounding: --tolerance {NARROW}"

    def _frozen(self) -> Iterator[Mismatch]:
        frozen = set[str]().union(*(rank.frozen for rank in self.ranks)) - set(self.twin.frozen)
        for name in sorted(frozen):
            kind = "frozen by the sharding: if that is meant, freeze it in the model"
            yield _not_comparable(Seen(START, "gradient", name), kind)

    def _at(self, moment: str) -> list[Seen]:
        """Return what a rank or the twin has at a moment, each tied parameter once: outputs first, then from
        the last parameter to the first, as a backward reaches them."""
        of_ranks = itertools.chain(*(rank.tensors for rank in self.ranks))
        of_twin = itertools.chain(self.twin.tensors, (seen for _, seen in self.twin.of_rank))
        there = [seen for seen in dict.fromkeys((*of_ranks, *of_twin)) if seen.moment == moment]
        again = self.twin.tied.keys() & self.ranks[0].tied.keys()
        once = [seen for seen in there[::-1] if seen.name not in again]
        return sorted(once, key=lambda seen: int(seen.name) if seen.what == "output" else len(there))

    @cached_property
    def _slices(self) -> dict[tuple[int, str], Place]:
        return places_of_slices(self.twin, self.ranks)

    def _expected(self, seen: Seen, rank: int) -> Tensor | None:
        """Return what a rank ought to have; None: the twin has nothing."""
        if seen.what == "output":
            return self.twin.of_rank.get((data_rank(self.mesh, rank), seen))
        tensor = self.twin.tensors.get(replace(seen, name=self.twin.tied.get(seen.name, seen.name)))
        if tensor is None:
            return None
        tensor = tensor.float() * (self.twin.factor if seen.what == "gradient" else 1.0)
        place = self._slices.get((rank, seen.name))
        return tensor if place is None else tensor.index_select(*place)

    def _of_tensor(self, seen: Seen, floor: float) -> Mismatch | str:
        """Return how one tensor differs, or why it is not compared."""
        expected = [self._expected(seen, rank) for rank in range(len(self.ranks))]
        found = [rank.tensors.get(seen) for rank in self.ranks]
        if all(tensor is None for tensor in expected):
            if seen.what == "gradient" and any(t is not None and bool(t.any()) for t in found):
                return _not_comparable(seen, "one process has no gradient of it")
            return f"{seen}, which one process does not have"
        whole = [t if t is not None else torch.zeros(()) for t in expected]
        lacking = [rank for rank, tensor in enumerate(found) if tensor is None and bool(whole[rank].any())]
        if lacking:
            where = "" if len(lacking) == len(found) else f" on rank {', '.join(map(str, lacking))}"
            return _not_comparable(seen, f"missing{where}")
        have = [
            t.float() if t is not None else torch.zeros_like(e) for t, e in zip(found, whole, strict=True)
        ]
        if seen.what == "loss" and any(not torch.equal(t, have[0]) for t in have):
            return "the loss, of which each rank returns its own"
        if seen.what == "buffer" and seen.moment != START and self._of_each_data_rank(have):
            return f"buffer {seen.name}, which data-parallel ranks write for themselves"
        for tensor, of_twin in zip(have, whole, strict=True):
            if tensor.shape != of_twin.shape:
                shapes = f"shape {tuple(tensor.shape)}, of one process {tuple(of_twin.shape)}"
                return _not_comparable(seen, shapes)
        rounding = self._rounding(seen) if seen.what == "change" else 0.0
        pairs = zip(have, whole, strict=True)
        errors = [relative_error(t, e.float(), floor, rounding=rounding) for t, e in pairs]
        error, scale = max(errors, key=lambda pair: pair[0])
        mismatch = Mismatch(seen.moment, str(seen), error, scale)
        if error <= (tolerance := self._tolerance(seen)):
            return mismatch
        looks = self._kind(seen, whole, have)
        if seen.what == "change" and self.twin.tolerances and not looks:
            looks = kind_of_update(error, tolerance)
        return replace(mismatch, kind=looks)

    def _kind(self, seen: Seen, expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
        apart = self.twin.tied.items() - self.ranks[0].tied.items()
        others = [of if name == seen.name else name for name, of in apart if seen.name in (name, of)]
        if seen.what == "gradient" and others:
            return f"tied with {' and '.join(others)} on one process, but a parameter of its own here"
        if seen.what == "value" and seen.moment == START:
            lost = "the values are not those that the model had before it was sharded"
            told = kind(expected[0], found, None, self.mesh) if not self._uneven(seen) else ""
            return f"{lost}{': ' * bool(told)}{told}"
        if self._uneven(seen) or seen.what == "output":
            kinds = {kind(e, [f], None, self.mesh) for e, f in zip(expected, found, strict=True)}
            wrong = [
                str(r)
                for r, pair in enumerate(zip(found, expected, strict=True))
                if relative_error(*pair)[0] > TOLERANCE
            ]
            return kinds.pop() if len(kinds) == 1 else f"on rank {', '.join(wrong)}"
        return kind(expected[0], found, self.twin.parts.get(seen), self.mesh)

    def _uneven(self, seen: Seen) -> bool:
        """Whether ranks hold different parts of a tensor."""
        return any((rank, seen.name) in self._slices for rank in range(len(self.ranks)))

    def _tolerance(self, seen: Seen) -> float:
        """Return the relative difference that is allowed: of a change that of its optimizer, if it is known,
        and the caller's is not of a narrower dtype."""
        tolerances = self.twin.tolerances if seen.what == "change" and self.tolerance <= TOLERANCE else {}
        return tolerances.get(seen.name, self.tolerance)

    def _rounding(self, seen: Seen) -> float:
        """Return the norm of what rounding makes of the values of a parameter."""
        value = self.twin.tensors.get(Seen(START, "value", self.twin.tied.get(seen.name, seen.name)))
        return 0.0 if value is None else rounding_of(value, self._tolerance(seen))

    def _of_each_data_rank(self, found: Sequence[Tensor]) -> bool:
        """Whether ranks that get the same rows have the same, and others have not."""
        groups = groups_over(self.mesh, ("cp", "tp"))
        alike = all(torch.equal(found[rank], found[group[0]]) for group in groups for rank in group)
        return alike and any(not torch.equal(found[group[0]], found[groups[0][0]]) for group in groups)


def _not_comparable(seen: Seen, kind: str) -> Mismatch:
    return Mismatch(seen.moment, str(seen), math.inf, math.nan, kind)


def compare_recorded(
    mesh: MeshPlan, twin: RankRecord, ranks: Sequence[RankRecord], tolerance: float = TOLERANCE
) -> CheckReport:
    """Return how the ranks differ from their twin: the report of a check."""
    return Comparison(mesh, twin, ranks, tolerance).report()
