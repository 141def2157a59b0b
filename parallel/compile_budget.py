"""An activation memory budget for each compiled unit, where torch has one for the whole process."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

SAVING_BACKENDS = ("inductor", "aot_eager_decomp_partition")  # whose partitioner knows a memory budget


def budget_mistakes(budget: float, compiled: bool, backend: str, place: str) -> list[str]:
    """A budget is the compiler's: it needs one, and a share to keep."""
    mistakes = []
    if not 0 <= budget <= 1:
        mistakes.append(
            f"{place}activation_budget={budget} must lie between 0 (recompute all) and 1 (keep all)"
        )
    if not compiled:
        mistakes.append(
            f"{place}activation_checkpoint=budget is the compiler's choice, and compiling is off: "
            "use full or selective, or compile"
        )
    elif backend not in SAVING_BACKENDS:
        mistakes.append(
            f"{place}activation_checkpoint=budget needs a compile backend that chooses what to keep "
            f"({', '.join(SAVING_BACKENDS)}), not {backend}"
        )
    return mistakes


@cache
def budget_backend(name: str, mode: str, budget: float) -> Callable[..., Any]:
    """A backend that keeps `budget` of what the backward could be given, and recomputes the rest.

    torch has one budget for the process, but reads it while it partitions a graph, inside the backend: so
    setting it there gives each unit its own. Cached, because blocks share a graph only if they share the
    backend too.
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config as functorch
    from torch._inductor import list_mode_options

    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):  # torch 2.13
        # It weighs every input of a graph, and refuses the DeviceMesh that comes with a weight split over tp.
        settings["unsafe_treat_script_objects_as_zero_size"] = True
    inner = lookup_backend(name)
    options = {"config_patches": list_mode_options(mode)} if mode != "default" else {}

    def compile_within_budget(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with functorch.patch(settings):
            return inner(graph, inputs, **options)

    return compile_within_budget
