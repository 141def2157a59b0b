"""The search space of the planner: combinations of values for the keys that the config leaves at `auto`."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.make import RunShape
from meshwright.parallel.plan.schema import CP_EXCHANGES, REDUCE_GRADIENTS, Plan
from meshwright.parallel.plan.strategy import STRATEGIES, strategy_settings

CHECKPOINTING = ("none", "selective", "full", "offload")
PREFETCH = (1, 2)  # units ahead; with 0 every all-gather is exposed
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # tried if the global batch is open too
MOST_SEQUENCES = 64  # per micro batch
MIN_CONTEXT_TOKENS = 8192  # of a rank: a sequence of fewer is not divided unless the config says so


@dataclass(frozen=True)
class Choices:
    """A value for every key that the planner may choose.

    `activation_checkpoint_blocks`: the number of units that use activation checkpointing; 0 with none.
    `prefetch`: of both directions, or forward/backward if the config sets them.
    """

    tp: Any
    cp: Any
    cp_exchange: str
    dp_replicate: Any
    dp_shard: Any
    activation_checkpoint: str
    activation_checkpoint_blocks: int
    reshard_after_forward: Any
    reduce_gradients: str
    reshard_after_backward: Any
    prefetch: Any
    micro_batch_size: Any

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    @cached_property
    def computed(self) -> "Choices":
        """The choices that decide what is computed and exchanged: all but when units gather and reduce."""
        return replace(self, **dict.fromkeys(GATHERING))  # type: ignore[arg-type]


CHOICES = tuple(field.name for field in fields(Choices))
# when units gather their parameters and reduce their gradients; makes no plan illegal
GATHERING = ("reshard_after_forward", "reduce_gradients", "reshard_after_backward", "prefetch")


def with_choices(
    config: ParallelConfig, shape: RunShape, choices: Choices
) -> tuple[ParallelConfig, RunShape]:
    """Return config and shape with the keys set to the choices."""
    keys = {key: choices[key] for key in CHOICES if key not in ("prefetch", "micro_batch_size")}
    if choices.activation_checkpoint == "none" or config.activation_checkpoint_blocks != "auto":
        del keys["activation_checkpoint_blocks"]
    keys |= dict.fromkeys(_open_prefetches(config), choices.prefetch)
    shape = replace(shape, micro_batch_size=choices.micro_batch_size)
    return replace(config, plan="manual", **keys), shape


def with_gathering(plan: Plan, config: ParallelConfig, choices: Choices) -> Plan:
    """Return a plan with other choices of when its units gather parameters and reduce gradients."""
    settings = {key: choices[key] for key in ("reduce_gradients", "reshard_after_backward")}
    settings |= dict.fromkeys(_open_prefetches(config), choices.prefetch)
    *others, last = plan.units  # the last is never resharded after its forward
    resharded = settings | {"reshard_after_forward": choices.reshard_after_forward}
    units = (*(_with(unit, **resharded) for unit in others), _with(last, **settings))
    return replace(plan, units=units)


# a search gives the same units the same settings over and over
_with = lru_cache(maxsize=2**15)(replace)


# the values of the keys, but for tp, that need the least memory
LEAST_MEMORY: dict[str, Any] = {
    "dp_replicate": 1,
    "activation_checkpoint": "full",
    "reshard_after_forward": True,
    "reduce_gradients": "every_micro_batch",
    "reshard_after_backward": True,
    "forward_prefetch": 1,
    "backward_prefetch": 1,
}


def least_memory(config: ParallelConfig, shape: RunShape, blocks: int) -> tuple[ParallelConfig, RunShape]:
    """Return config and shape with all open keys but tp set to LEAST_MEMORY. `blocks`: of the model."""
    least = LEAST_MEMORY | (
        {"activation_checkpoint_blocks": blocks} if config.activation_checkpoint != "none" else {}
    )
    closed = {key: value for key, value in least.items() if getattr(config, key) == "auto"}
    micro_batch_size = 1 if shape.micro_batch_size == "auto" else shape.micro_batch_size
    return replace(config, **closed), replace(shape, micro_batch_size=micro_batch_size)


def _open_prefetches(config: ParallelConfig) -> list[str]:
    return [key for key in ("forward_prefetch", "backward_prefetch") if getattr(config, key) == "auto"]


def combinations(config: ParallelConfig, shape: RunShape, blocks: int = 0) -> Iterator[Choices]:
    """Yield choices: for each key the value of the config, or each value to try where it is `auto`, the
    simplest first. `make_plan` refuses the illegal combinations.

    `blocks`: the number of units that can use activation checkpointing; all do, or the config's number.
    """
    requested = config.activation_checkpoint_blocks
    most = blocks if requested == "auto" else min(requested, blocks)
    for tp, (cp, exchange) in itertools.product(
        _degrees(config.tp, min(shape.gpus_per_node, shape.world_size)), _context_parallel(config, shape)
    ):
        for replicate, shard, reshards in _data_parallel(config, shape, tp, cp):
            modes = _options(config.activation_checkpoint, CHECKPOINTING)
            prefetches, sizes = _prefetches(config, shard * cp), _micro_batches(shape, replicate * shard)
            for mode, reshard, prefetch, micro in itertools.product(modes, reshards, prefetches, sizes):
                many = shard * cp > 1 and shape.global_batch_size > micro * replicate * shard
                reduces = _options(
                    config.reduce_gradients, REDUCE_GRADIENTS if many else REDUCE_GRADIENTS[:1]
                )
                frees = _options(config.reshard_after_backward, (True, False) if many else (True,))
                for reduce, free in itertools.product(reduces, frees):
                    of_mode = mode, 0 if mode == "none" else most
                    gathering = reshard, reduce, free, prefetch
                    yield Choices(tp, cp, exchange, replicate, shard, *of_mode, *gathering, micro)


def _context_parallel(config: ParallelConfig, shape: RunShape) -> list[tuple[Any, str]]:
    """Return the cp degrees to try, each with an exchange; several only if there is something to exchange."""
    most = max(1, shape.seq_len // MIN_CONTEXT_TOKENS)
    degrees = [n for n in _degrees(config.cp, shape.world_size) if n <= most or config.cp != "auto"]
    return [
        (cp, exchange)
        for cp in degrees
        for exchange in ((config.cp_exchange,) if cp == 1 else _options(config.cp_exchange, CP_EXCHANGES))
    ]


def _prefetches(config: ParallelConfig, shard: int) -> tuple[Any, ...]:
    """Return the prefetch depths to try: only one if nothing is gathered or both directions are set."""
    if not _open_prefetches(config):
        return (f"{config.forward_prefetch}/{config.backward_prefetch}",)
    return PREFETCH if shard > 1 else PREFETCH[:1]


def _data_parallel(
    config: ParallelConfig, shape: RunShape, tp: int, cp: int
) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """Yield dp_replicate, dp_shard and the values of reshard_after_forward to try with them. With
    `parallel.strategy` they are those of the strategy; a config key that contradicts them is kept, and
    `make_plan` refuses it."""
    degrees, settings = _degrees(config.dp_replicate, shape.world_size), dict[str, Any]()
    if config.strategy in STRATEGIES:
        settings = strategy_settings(config, max(tp * cp, 1), shape.world_size, shape.gpus_per_node)
        degrees = list(_options(config.dp_replicate, (settings["dp_replicate"],)))
    for replicate in degrees:
        left = settings.get("dp_shard", max(1, shape.world_size // max(tp * cp * replicate, 1)))
        shard: Any = left if config.dp_shard in ("auto", -1) else config.dp_shard
        both = not settings and shard * cp > 1
        reshards = (True, False) if both else (settings.get("reshard_after_forward", True),)
        yield replicate, shard, _options(config.reshard_after_forward, reshards)


def _options(requested: Any, all_values: tuple[Any, ...]) -> tuple[Any, ...]:
    return all_values if requested == "auto" else (requested,)


def _degrees(requested: Any, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if most % n == 0] if requested == "auto" else [requested]


def _micro_batches(shape: RunShape, data_parallel: int) -> list[Any]:
    """Return the micro batch sizes to try: the divisors of a rank's share of the global batch."""
    if shape.micro_batch_size != "auto":
        return [shape.micro_batch_size]
    if shape.global_batch_size == -1:
        return list(MICRO_BATCHES)
    share = shape.global_batch_size // max(data_parallel, 1)
    return [n for n in range(1, min(share, MOST_SEQUENCES) + 1) if share % n == 0] or [1]
