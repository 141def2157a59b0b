"""The single changes to a run that would free most of its memory, by the planner's estimate."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import Hardware
from meshwright.train.config import Config
from meshwright.train.planning import plan_run
from meshwright.train.predict import predict, predict_memory

SHOWN = 3
LOSS_CHUNK_TOKENS = 2048  # what parallel.loss_chunk_tokens=auto means for long micro batches
WORTH = 0.01  # of the peak: what frees less is no way out


@dataclass(frozen=True)
class Saving:
    """Keys to give, by name; the bytes per process that this frees at the peak; and how much longer a step
    takes, as a share of it (below 0: shorter), None where that cannot be said."""

    keys: Mapping[str, object]
    freed_bytes: int
    slower: float | None

    def describe(self) -> str:
        """In one line."""
        keys = " ".join(f"--{key}={str(value).lower()}" for key, value in self.keys.items())
        time = "" if self.slower is None else f", a step takes {self.slower:+.0%}"
        return f"{keys}: {self.freed_bytes / 2**30:.2f} GiB less{time}"


def largest_savings(
    config: Config, plan: Plan, hardware: Hardware | None, gpus_per_node: int
) -> list[Saving]:
    """At most SHOWN, the largest first, of those that leave data, model and global batch as they are."""
    now = _as_keys(config, plan)
    peak_bytes, step_s = _estimate(now, plan, hardware, gpus_per_node)
    savings = []
    for keys in _changes(now, plan):
        try:
            needed_bytes, changed_s = _estimate(_with_keys(now, keys), plan, hardware, gpus_per_node)
        except (PlanError, ValueError):  # not a legal plan here
            continue
        if peak_bytes - needed_bytes > WORTH * peak_bytes:
            in_time = "parallel.cpu_offload" not in keys  # its copies are not in the step's time
            slower = changed_s / step_s - 1 if step_s and changed_s and in_time else None
            savings.append(Saving(keys, peak_bytes - needed_bytes, slower))
    return sorted(savings, key=lambda saving: -saving.freed_bytes)[:SHOWN]


def _estimate(
    config: Config, plan: Plan, hardware: Hardware | None, gpus_per_node: int
) -> tuple[int, float | None]:
    """Bytes of a process at its peak, and the seconds of a step."""
    changed = plan_run(config, plan.mesh.world_size, gpus_per_node, plan.attention)
    if hardware is None:
        return predict_memory(config, changed).peak_bytes, None
    predicted = predict(config, changed, hardware, gpus_per_node)
    return predicted.memory.peak_bytes, predicted.timeline.step_s


def _changes(config: Config, plan: Plan) -> Iterator[Mapping[str, object]]:
    """Whatever may free something. Changes of one thing that free more than another of the same come
    alone."""
    # which some keys would change
    parallel, batch = config.parallel, {"train.global_batch_size": plan.global_batch_size}
    if parallel.activation_checkpoint != "full":
        yield {"parallel.activation_checkpoint": "full"}
    if parallel.activation_checkpoint in ("none", "offload"):
        yield {"parallel.activation_checkpoint": "selective"}
    if plan.micro_batch_size > 1 and plan.micro_batch_size % 2 == 0:
        yield {"train.micro_batch_size": plan.micro_batch_size // 2, **batch}
    if parallel.reshard_after_forward is not True and not parallel.strategy:
        yield {"parallel.reshard_after_forward": True}
    if not plan.loss_chunk_tokens or plan.loss_chunk_tokens > LOSS_CHUNK_TOKENS:
        yield {"parallel.loss_chunk_tokens": LOSS_CHUNK_TOKENS}
    if plan.mesh.dp_replicate > 1:
        yield {"parallel.dp_replicate": 1, "parallel.dp_shard": plan.mesh.data_parallel, **batch}
    if plan.mesh.dp_shard % 2 == 0:
        yield {"parallel.tp": 2 * plan.mesh.tp, "parallel.dp_shard": plan.mesh.dp_shard // 2, **batch}
    if config.optim.state_dtype == "float32":
        yield {"optim.state_dtype": "bfloat16"}
    if plan.storage_dtype == "float32":
        yield {"parallel.storage_dtype": "bfloat16"}
    if not plan.cpu_offload:
        yield {"parallel.cpu_offload": True}


def _as_keys(config: Config, plan: Plan) -> Config:
    """The same run by keys of its own, also where the planner or a plan file has decided: of the blocks as of
    the first."""
    block = next(unit for unit in plan.units if unit.modules[0].startswith("layers."))
    decided: dict[str, Any] = {
        "plan": "manual",
        "strategy": None,
        "dp_replicate": plan.mesh.dp_replicate,
        "dp_shard": plan.mesh.dp_shard,
        "tp": plan.mesh.tp,
        "reshard_after_forward": block.reshard_after_forward,
        "param_dtype": block.param_dtype,
        "activation_checkpoint": block.activation_checkpoint,
        "loss_chunk_tokens": plan.loss_chunk_tokens,
        "storage_dtype": plan.storage_dtype,
        "cpu_offload": plan.cpu_offload,
    }
    train = dataclasses.replace(
        config.train, micro_batch_size=plan.micro_batch_size, global_batch_size=plan.global_batch_size
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **decided), train=train)


def _with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    for key, value in keys.items():
        section, name = key.split(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
