"""What activation_checkpoint offload sends to host memory: which blocks, how much, and how long a copy takes.
How it is done is in parallel/activation_offload.py; what it does to memory on the device is in memory.py, and
to a step in streams.py."""

from collections.abc import Mapping
from itertools import pairwise

from meshwright.parallel.plan import Plan
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.work import DTYPE_BYTES, ModelWork


def sent_blocks(plan: Plan, work: ModelWork) -> dict[str, str]:
    """Each block whose activations are sent -> the next block with offload. The last one's are needed first:
    they stay."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    names = (
        name
        for name in plan.modules
        if unit_of[name].activation_checkpoint == "offload" and work.has_backward((name,))
    )
    return dict(pairwise(names))


def host_bytes(plan: Plan, work: ModelWork) -> int:
    """What a rank keeps in host memory: activations, and what `cpu_offload` does. Pinned memory comes in
    powers of two, which is not counted."""
    sent = sum(work.modules[name].keeps.at(plan.micro_batch_size) for name in sent_blocks(plan, work))
    return int(sent) + (stored_bytes(plan, work) if plan.cpu_offload else 0)


def stored_bytes(plan: Plan, work: ModelWork) -> int:
    """A rank's shards of parameters, gradients and moments, as if every weight could be divided evenly."""
    parameters = sum(work.modules[name].parameters for name in plan.modules)
    trained = sum(work.modules[name].parameters * work.trained.get(name, 1.0) for name in plan.modules)
    values = DTYPE_BYTES[plan.storage_dtype] * (parameters + trained) + 2 * work.moment_bytes * trained
    return int(values / plan.mesh.dp_shard)


def copy_times(plan: Plan, work: ModelWork, hardware: Hardware) -> Mapping[str, float]:
    """Seconds of one copy of what each block with offload sends, in the order of the forward; 0 for the last
    one's, which stay. No copy's latency matters beside its bytes."""
    sent = sent_blocks(plan, work)
    if not sent:
        return {}
    seconds = {
        name: work.modules[name].keeps.at(plan.micro_batch_size) / (hardware.host_gb_s * 1e9) for name in sent
    }
    return seconds | {next(reversed(sent.values())): 0.0}
