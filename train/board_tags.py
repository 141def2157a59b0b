"""What TensorBoard calls the figures of a row: in groups, and what was predicted beside what is measured."""

from collections.abc import Mapping
from typing import Any

PREDICTED = "predicted_"  # begins the name of a figure of metrics.jsonl that the planner has predicted
UNIT_NORMS = "unit_grad_norms"
UNIT_NORMS_TAG = "gradient_norm"
TAGS = {
    "loss": "loss/train",
    "eval_loss": "loss/eval",
    "loss_spike": "loss/spike",
    "grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/lr",
    "skipped_steps": "optimizer/skipped_steps",
    "tokens_per_s": "speed/tokens_per_s",
    "tokens_per_s_per_gpu": "speed/tokens_per_s_per_gpu",
    "mfu": "speed/mfu",
    "mfu_causal": "speed/mfu_causal",
    "step_time_s": "speed/step_time_s",
    "recompiles": "speed/recompiles",
    "peak_memory_gib": "memory/peak_gib",
    "reserved_memory_gib": "memory/reserved_gib",
    "data_wait_s": "data/wait_s",
    "epoch": "data/epoch",
}
# of names that go on with a set or source
GROUPS = {"eval/": "eval/", "epoch/": "data/epoch/", "sequences/": "data/sequences/"}


def tag_of(name: str) -> str:
    """The tag of a figure that has this name in metrics.jsonl; one that nobody has listed is in the group
    other."""
    if name.startswith(PREDICTED):
        return f"{tag_of(name.removeprefix(PREDICTED))}_predicted"  # sorted just behind the measured one
    for prefix, group in GROUPS.items():
        if name.startswith(prefix):
            return group + name.removeprefix(prefix)
    return TAGS.get(name, f"other/{name}")


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by their tags, those of each unit among them; neither the step nor words."""
    scalars = {
        tag_of(name): value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float)
    }
    return scalars | {f"{UNIT_NORMS_TAG}/{unit}": norm for unit, norm in row.get(UNIT_NORMS, {}).items()}
