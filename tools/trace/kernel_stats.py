"""A row for each kernel, with a readable name, the unit that a compiled graph is of, and how what is known of
its calls adds up."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from meshwright.tools.trace.roofline import OperatorWork, Roof

LONGEST = 64  # characters
COMPILED = re.compile(r"## Call CompiledFxGraph (\w+) ##")
HASH_SHOWN = 8  # characters of a graph's hash: enough to find it in inductor's cache
_PARENTHESES = re.compile(r"\(anonymous namespace\)::|\(anonymous class\)")
# Of a template's arguments, the words that say what it computes, and those that only seem to.
_TELLING = re.compile(
    r"\w*Functor\w*|\w*(?:Ops|FwdSm\d+|BwdSm\d+)\b|\w*(?:gemm|Gemm|GEMM)\w*|\w{3,}_kernel\w*"
)
_VAGUE = re.compile(
    r"gemm|gpu_kernel_impl\w*|gpu_kernel|enable_\w+|\w+_traits|device_kernel|elementwise_kernel"
)
_NUMBERED = re.compile(r"(.+)\.\d+")


def short_name(kernel: str) -> str:
    """A kernel's name for a table: without types, namespaces and addresses; Triton's, cuBLAS's and cuDNN's as
    they are, with their middle left out where they are long."""
    name = _PARENTHESES.sub("", kernel).removeprefix("void ").strip()
    if "<" not in name and "(" not in name:
        return _cut(name)
    head = re.split(r"[<(]", name, maxsplit=1)[0].rpartition("::")[2].strip() or name
    inside = name[name.index(head) + len(head) :]
    telling = [word for word in _TELLING.findall(inside) if not _VAGUE.fullmatch(word) and word != head]
    if head in ("Kernel", "Kernel2", "device_kernel") and telling:
        return _cut(telling[0])
    return _cut(" ".join([head, *telling[:1]]))


def _cut(name: str) -> str:
    """Both ends of a long name: Triton's end with a number that tells them apart."""
    if len(name) <= LONGEST:
        return name
    half = (LONGEST - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def graph_name(graph: str, places: Collection[tuple[str, str]]) -> str:
    """Of a compiled graph by its hash, and the units and phases that its calls were in ("", "": in none): the
    one that all share, as "compiled forward of layers.*", else the start of its hash."""
    units, phases = {unit for unit, _ in places}, {phase for _, phase in places}
    stems = {found[1] if (found := _NUMBERED.fullmatch(unit)) else unit for unit in units}
    if "" in units or len(stems) != 1 or len(phases) != 1:
        return f"compiled graph {graph[:HASH_SHOWN]}"
    unit = min(units) if len(units) == 1 else f"{min(stems)}.*"
    return f"compiled {min(phases)} of {unit}"


@dataclass(frozen=True)
class KernelRow:
    """A kernel, or operator, in a step on average.

    Args:
        name: readable; "(causal: half)" where causal attention is counted as half of its operations
        calls_per_step: how often it ran
        seconds_per_step: how long, all calls together
        share: of the seconds of all kernels of its sort: that compute, or that communicate
        tflops: 10^12 operations per second; None where those of a call are not known
        gb_s: 10^9 bytes read or written per second, or, of a collective, the bus bandwidth as nccl-tests
            count it; None likewise, and where they are more than the device's memory can have moved
        roof_share: the time that it would take at the device's roof / the time that it took; None where that
            is not known
        communication: whether it is a collective
    """

    name: str
    calls_per_step: float
    seconds_per_step: float
    share: float
    tflops: float | None
    gb_s: float | None
    roof_share: float | None
    communication: bool = False


@dataclass(slots=True)
class Known:
    """Of some calls, how much is known of them and in how many seconds they did it; `missing`: calls of which
    it is not."""

    amount: float = 0.0
    seconds: float = 0.0
    missing: int = 0

    def add(self, amount: float | None, seconds: float) -> None:
        if amount is None:
            self.missing += 1
        else:
            self.amount += amount
            self.seconds += seconds

    def join(self, other: "Known") -> None:
        self.amount += other.amount
        self.seconds += other.seconds
        self.missing += other.missing

    def rate(self) -> float | None:
        """Amount per second, if it is known of every call."""
        return self.amount / self.seconds if self.seconds > 0 and not self.missing else None


class Tally:
    """The calls of one kernel."""

    __slots__ = ("bytes", "calls", "communication", "flops", "halved", "least_s", "name", "seconds")

    def __init__(self, name: str, communication: bool = False) -> None:
        self.name, self.communication = name, communication
        self.calls, self.seconds, self.halved = 0, 0.0, False
        self.flops, self.bytes, self.least_s = Known(), Known(), Known()

    def add_work(self, work: OperatorWork | None, seconds: float, roof: Roof | None) -> None:
        """What a call did; one whose launch is not in the trace is not added: nothing can be known of it."""
        self.flops.add(work.flops if work else None, seconds)
        self.bytes.add(work.bytes if work else None, seconds)
        self.least_s.add(roof.least_s(work) if roof and work else None, seconds)
        self.halved |= bool(work and work.halved)

    def join(self, other: "Tally") -> None:
        """Add the calls of another."""
        self.calls += other.calls
        self.seconds += other.seconds
        self.halved |= other.halved
        for mine, its in (
            (self.flops, other.flops),
            (self.bytes, other.bytes),
            (self.least_s, other.least_s),
        ):
            mine.join(its)

    def row(self, steps: int, all_seconds: float) -> KernelRow:
        """Of so many steps, in which all kernels of its sort took `all_seconds`."""
        flops, moved, roof_share = self.flops.rate(), self.bytes.rate(), self.least_s.rate()
        if flops is None and (roof_share or 0) > 1:  # it stayed in a cache, or was not read as a whole
            moved = roof_share = None
        return KernelRow(
            f"{self.name} (causal: half)" if self.halved else self.name,
            self.calls / steps,
            self.seconds / steps,
            self.seconds / all_seconds if all_seconds else 0.0,
            flops and flops / 1e12,
            moved and moved / 1e9,
            roof_share,
            self.communication,
        )


def ranked(tallies: Iterable[Tally], steps: int, most: int) -> list[KernelRow]:
    """Those that take longest: at most so many that compute, then at most so many collectives."""
    rows = []
    by_time = sorted(tallies, key=lambda tally: (-tally.seconds, tally.name))
    for communication in (False, True):
        sort = [tally for tally in by_time if tally.communication == communication]
        all_seconds = sum(tally.seconds for tally in sort)
        rows += [tally.row(steps, all_seconds) for tally in sort[:most]]
    return rows
