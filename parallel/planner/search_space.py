"""What the search for a plan tries: values of the keys that the config leaves open, in every combination that
can be legal; and how few blocks have to be recomputed, or sent away, for a plan to fit: bounds that spare
most of the looking."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.make import RunShape
from meshwright.parallel.plan.strategy import STRATEGIES, strategy_settings
from meshwright.parallel.planner.cost_model import StepTimes

CHOICES = (
    "tp",
    "dp_replicate",
    "dp_shard",
    "activation_checkpoint",
    "activation_checkpoint_blocks",
    "reshard_after_forward",
    "prefetch",
    "micro_batch_size",
)
CHECKPOINTING = ("none", "selective", "full", "offload")
PREFETCH = (1, 2)  # units ahead; 0 shows every all-gather
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # where nothing says how many sequences a rank gets
MOST_SEQUENCES = 64  # of a micro batch


def with_choices(
    config: ParallelConfig, shape: RunShape, choices: Mapping[str, Any]
) -> tuple[ParallelConfig, RunShape]:
    """Config and shape with the choices in their keys."""
    of_none = {"activation_checkpoint_blocks"} if choices["activation_checkpoint"] == "none" else set()
    keys = {
        key: value for key, value in choices.items() if key not in {"prefetch", "micro_batch_size"} | of_none
    }
    keys |= {
        key: choices["prefetch"]
        for key in ("forward_prefetch", "backward_prefetch")
        if getattr(config, key) == "auto"
    }
    shape = dataclasses.replace(shape, micro_batch_size=choices["micro_batch_size"])
    return dataclasses.replace(config, plan="manual", **keys), shape


def combinations(config: ParallelConfig, shape: RunShape, gpus_per_node: int) -> Iterator[dict[str, Any]]:
    """Values of the keys, the simplest first. Degrees that the config leaves open multiply to the number of
    processes."""
    for tp in _degrees(config.tp, min(gpus_per_node, shape.world_size)):
        for replicate, shard, reshards in _data_parallel(config, shape, tp):
            prefetches = _prefetches(config, shard)
            modes, sizes = (
                _options(config.activation_checkpoint, CHECKPOINTING),
                _micro_batches(shape, replicate * shard),
            )
            for checkpointing, reshard, prefetch, micro in itertools.product(
                modes, reshards, prefetches, sizes
            ):
                yield {
                    "tp": tp,
                    "dp_replicate": replicate,
                    "dp_shard": shard,
                    "activation_checkpoint": checkpointing,
                    "reshard_after_forward": reshard,
                    "prefetch": prefetch,
                    "micro_batch_size": micro,
                }


def _prefetches(config: ParallelConfig, shard: int) -> tuple[Any, ...]:
    """Depths to try: one where nothing is gathered, or where both directions are given."""
    if "auto" not in (config.forward_prefetch, config.backward_prefetch):
        return (f"{config.forward_prefetch}/{config.backward_prefetch}",)
    return PREFETCH if shard > 1 else PREFETCH[:1]


def _data_parallel(
    config: ParallelConfig, shape: RunShape, tp: int
) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """dp_replicate, dp_shard, and values of reshard_after_forward to try with them: a strategy's own, if one
    is named, but for what the config says otherwise, which `make_plan` refuses."""
    if config.strategy in STRATEGIES:
        own = strategy_settings(config, max(tp, 1), shape.world_size, shape.gpus_per_node)
        asked = {key: getattr(config, key) for key in ("dp_replicate", "dp_shard")}
        replicate, shard = (own[key] if value in ("auto", -1) else value for key, value in asked.items())
        yield (
            replicate,
            shard,
            _options(config.reshard_after_forward, (own.get("reshard_after_forward", True),)),
        )
        return
    for replicate in _degrees(config.dp_replicate, shape.world_size):
        left = max(1, shape.world_size // max(tp * replicate, 1))
        shard = left if config.dp_shard in ("auto", -1) else config.dp_shard
        yield (
            replicate,
            shard,
            _options(config.reshard_after_forward, (True,) if shard == 1 else (True, False)),
        )


def _options(asked: Any, all_of_them: tuple[Any, ...]) -> tuple[Any, ...]:
    return all_of_them if asked == "auto" else (asked,)


def _degrees(asked: Any, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if most % n == 0] if asked == "auto" else [asked]


def _micro_batches(shape: RunShape, data_parallel: int) -> list[Any]:
    """Sizes to try: those that divide a rank's share of the global batch."""
    if shape.micro_batch_size != "auto":
        return [shape.micro_batch_size]
    if shape.global_batch_size == -1:
        return list(MICRO_BATCHES)
    share = shape.global_batch_size // max(data_parallel, 1)
    return [n for n in range(1, min(share, MOST_SEQUENCES) + 1) if share % n == 0] or [1]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What can be said of a plan at once: what its parts take, seconds of a step that waits for nothing,
    bytes that it needs at least, and bytes of host memory."""

    times: StepTimes
    lower_bound_s: float
    needed_bytes: int
    host_bytes: int


def part_s(kept: Bounds, treated: Bounds, share: float, micro_batches: int) -> float:
    """Seconds of a step at least where a share of the blocks is treated: recomputing costs its share, and
    copying what it takes longer than computing."""
    if host_s := treated.times.host_s:
        part = {name: seconds * share for name, seconds in host_s.items()}
        return dataclasses.replace(treated.times, host_s=part).busy_s(micro_batches)
    return kept.lower_bound_s + share * (treated.lower_bound_s - kept.lower_bound_s)


def smallest(low: int, high: int, guess: int, fits: Callable[[int], bool]) -> int:
    """The smallest number from `low` to `high` that fits, where `high` does, and all from the smallest one
    on. A good guess costs two looks."""
    guess = min(max(guess, low), high)
    if guess > low and not fits(guess - 1):
        low = guess
    if guess < high and fits(guess):
        high = guess
    return low + bisect.bisect_left(range(low, high), True, key=fits)
