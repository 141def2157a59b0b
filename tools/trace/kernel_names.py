"""Readable names for kernels: what a template of many lines is at heart, and which unit a compiled graph is
of."""

import re
from collections.abc import Collection

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
