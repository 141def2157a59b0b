"""What the annotations and operators of a trace mean: names given by train.profiling, FSDP2, c10d, gloo and
torch.compile."""

import re
from dataclasses import dataclass

ROOT_END = "root_post_backward_callback"
FORWARD_KINDS = frozenset({"forward", "pre_forward", "post_forward", "forward_prefetch", "root_pre_forward"})
BACKWARD_KINDS = frozenset(
    {
        "backward",
        "pre_backward",
        "backward_prefetch",
        "post_backward_accumulate",
        "post_backward_reshard",
        "post_backward_rs_wait",
        "post_backward_reduce",
        ROOT_END,
    }
)
WORK_OF = {  # kind of label -> what the compute lane does in it
    "forward": "forward",
    "backward": "backward",
    "all_gather": "copy_in",
    "post_backward_reduce": "copy_in",
    "post_backward_accumulate": "copy_in",
    "post_backward_reshard": "copy_in",
    "pre_forward": "copy_out",
    "pre_backward": "copy_out",
    "all_gather_copy_out": "copy_out",
    "optimizer": "optimizer",
}
_STEP = re.compile(r"ProfilerStep#(\d+)")
_UNIT_WORK = re.compile(r"(\S+) (forward|backward)")
_FSDP = re.compile(r"FSDP::(\w+)(?: \((.*)\)| for (.*))?")
_COMPILED = "## Call CompiledFxGraph"
# Not computing itself, and looked into: what autograd and c10d wrap around operators.
_WRAPPERS = (
    "autograd::engine::",
    "torch::autograd::",
    "c10d::",
    "c10d_functional::",
    "_c10d_functional::",
    "symm_mem::",
)
COLLECTIVES = {  # part of a name of c10d, gloo or NCCL, the first that is found -> collective
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}


@dataclass(frozen=True, slots=True)
class Label:
    """An annotation on a CPU thread. `kind`: forward, backward, optimizer, or FSDP2's own, as in
    "FSDP::pre_forward"; `unit` as in plan.yaml, "" where there is none."""

    thread: int
    kind: str
    unit: str
    start_ns: int
    end_ns: int


def step_number(name: str) -> int | None:
    """Of "ProfilerStep#10"."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def parse_label(name: str) -> tuple[str, str] | None:
    """Kind and unit of an annotation that says what is being done for whom, else None."""
    if found := _FSDP.fullmatch(name):
        unit = found[2] or found[3] or ""
        return found[1], unit.replace(", ", "+")  # of several modules, as UnitPlan.name joins them
    if found := _UNIT_WORK.fullmatch(name):
        return found[2], found[1]
    return ("optimizer", "") if name.startswith("Optimizer.step#") else None


def counts_as_compute(name: str) -> bool:
    """Whether a CPU operator is work as a whole: a kernel's or a compiled graph, not what only wraps
    others."""
    return name.startswith(_COMPILED) or ("::" in name and not name.startswith(_WRAPPERS))


def is_wait(name: str) -> bool:
    """Whether a CPU operator only waits for a collective."""
    return name.endswith("::wait_tensor") or name in ("c10d::barrier", "c10d::monitored_barrier_")


def launched_collective(name: str) -> str | None:
    """The collective that a CPU operator of c10d launches."""
    return find_collective(name[6:]) if name.startswith("c10d::") else None


def find_collective(name: str) -> str | None:
    """The collective that a name is of."""
    lowered = name.lower()
    return next((collective for part, collective in COLLECTIVES.items() if part in lowered), None)
