"""What a check found, as data and as text."""

import math
from dataclasses import dataclass
from xml.etree import ElementTree

from meshwright.parallel.model.parts import LOSSES
from meshwright.parallel.plan.schema import MeshPlan

MOST_LINES = 20  # of differing tensors in the text


@dataclass(frozen=True)
class Mismatch:
    """A tensor that the sharded model computes differently.

    Args:
        run: eager, compiled or optimizer; of somebody else's sharding the moment at which the tensor differs
            first
        name: an output, or the parameter whose gradient or update it is
        error: norm of the difference as a share of the norm
        scale: the factor by which the sharded tensor is too large, if it is otherwise right; else NaN
        kind: what the difference looks like; "" for nothing known
    """

    run: str
    name: str
    error: float
    scale: float
    kind: str = ""

    def __str__(self) -> str:
        off = f" is off by {self.error:.1e}" if math.isfinite(self.error) else ""
        return f"{self.run}: {self.name}{off}{': ' * bool(self.kind)}{self.kind}"


@dataclass(frozen=True)
class CheckReport:
    """What a check found.

    Args:
        degrees: of the mesh that was checked
        blocks: those of the cut model
        compared: outputs, gradients and updates
        largest: the largest relative difference
        differences: those above the tolerance, outputs first
        graphs: compiled graphs; 0 if the plan does not compile
        loss: what the caller's loss is over rows: "sum", "mean", "neither"; "" if none was given
        not_run: the parts of the plan and of the model that were not run so, or not compared
        hints: what holds for the whole
    """

    degrees: MeshPlan
    blocks: tuple[str, ...]
    compared: int
    largest: float
    differences: tuple[Mismatch, ...]
    graphs: int
    loss: str = ""
    not_run: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether the sharded model computes the same."""
        return not self.differences

    def junit(self) -> str:
        """Return a JUnit file: a test that passes, or one that fails for each difference."""
        suite = ElementTree.Element("testsuite", name="meshwright.check", failures=str(len(self.differences)))
        suite.set("tests", str(len(self.differences) or 1))
        for each in self.differences:
            case = ElementTree.SubElement(suite, "testcase", classname=each.run, name=each.name)
            ElementTree.SubElement(case, "failure", message=str(each))
        if self.same:
            ElementTree.SubElement(suite, "testcase", classname="meshwright.check", name="the same")
        ElementTree.SubElement(suite, "system-out").text = str(self)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)

    def __str__(self) -> str:
        degrees = " x ".join(f"{axis} {getattr(self.degrees, axis)}" for axis in self.degrees.axes)
        runs = f", eager and compiled ({self.graphs} graph{'s' * (self.graphs > 1)})" if self.graphs else ""
        head = f"{self.compared} tensors on {degrees}{runs}"
        tail = LOSSES[self.loss] + "".join(f"\n{hint}" for hint in self.hints)
        tail += f"\nnot run: {'; '.join(self.not_run)}" if self.not_run else ""
        if self.same:
            return f"{head}: the same, largest difference {self.largest:.1e}{tail}"
        lines = [f"{head}: {len(self.differences)} differ:{tail}"]
        lines += [f"  {each}" for each in self.differences[:MOST_LINES]]
        if (more := len(self.differences) - MOST_LINES) > 0:
            lines.append(f"  and {more} more (--json has all)")
        return "\n".join(lines)
