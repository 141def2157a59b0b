"""`python -m tools.plan --gpu list`: the kinds of machines, and the errors of predictions for them."""

from typing import Any

from meshwright.parallel.planner.accuracy import CPU, load_errors
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.cli import format_table, to_json


def list_kinds(as_json: bool) -> str:
    """Return the kinds in configs/hardware as a table or as JSON; `errors` is null if no run was compared."""
    kinds: list[dict[str, Any]] = [
        {
            "kind": kind.name,
            "memory_gib": kind.memory_gib,
            "bfloat16_tflops": kind.peak_tflops["bfloat16"],
            "memory_gb_s": kind.memory_gb_s,
            "source": kind.source,
            "errors": load_errors().get(CPU if kind.cores else kind.name),
        }
        for kind in load_hardware().values()
    ]
    if as_json:
        return to_json({"kinds": kinds})
    rows = [[str(value or "no run was compared") for value in kind.values()] for kind in kinds]
    return format_table(("kind", "GiB", "bf16 TFLOP/s", "GB/s", "source", "errors of speeds"), rows)
