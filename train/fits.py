"""Whether a plan fits into memory, and the nearest things that would."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from models.cost import block_activations
from models.llama import SHARDING, Llama, LlamaConfig
from models.size import count_parameters
from parallel.plan import Plan, PlanError
from parallel.planner.memory import MemoryEstimate, ModelFootprint, ModuleFootprint, estimate_memory
from parallel.tensor import split_in
from train.build import freeze
from train.config import Config, list_configs, load_config
from train.planning import model_units, plan_run

GIB = 2**30
MAX_PROCESSES = 65536  # where the search for how many processes would do ends
MIN_SEQ_LEN = 512  # tokens: where the search for a shorter sequence ends


def predict_memory(config: Config, plan: Plan) -> MemoryEstimate:
    """Memory of one rank under `plan`."""
    model = dataclasses.replace(footprint(config.model, plan), trained=_trained_shares(config))
    return estimate_memory(plan, model, config.train.seq_len)


def _trained_shares(config: Config) -> dict[str, float]:
    """Share of each module's parameters that `train.freeze` leaves to be trained. Raises ConfigError as `freeze` does."""
    if not config.train.freeze:
        return {}
    with torch.device("meta"):
        model = Llama(config.model)
    freeze(model, config.train.freeze)
    shares = {}
    for name in model_units(config.model).modules:
        parameters = list(model.get_submodule(name).parameters())
        shares[name] = sum(p.numel() for p in parameters if p.requires_grad) / sum(p.numel() for p in parameters)
    return shares


def footprint(config: LlamaConfig, plan: Plan) -> ModelFootprint:
    """The sizes of a Llama's modules on one tp rank of `plan`."""
    split = {part: plan.mesh.tp if split_in(plan.tensor, table) else 1 for part, table in SHARDING.items()}
    counts = count_parameters(config, split)
    kept = block_activations(config, split, plan.mesh.tp if plan.tensor.sequence_parallel else 1)
    block = ModuleFootprint(counts.block, kept.everything, kept.products, kept.input)
    modules = {"tok_embeddings": ModuleFootprint(counts.embedding), "head": ModuleFootprint(counts.head)}
    modules |= {f"layers.{i}": block for i in range(config.n_layers)}
    split_logits = "loss" in plan.tensor.styles.values()
    return ModelFootprint(modules, config.vocab_size // (plan.mesh.tp if split_logits else 1))


def check_fits(config: Config, plan: Plan, available_bytes: int, device_name: str) -> MemoryEstimate:
    """Raise PlanError if the plan needs more than a process has, saying the nearest things that would fit."""
    needed = predict_memory(config, plan)
    if needed.total <= available_bytes:
        return needed
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in dataclasses.asdict(needed).items() if size > GIB / 20)
    fits = _nearest_that_fit(config, plan.mesh.world_size, available_bytes)
    raise PlanError(f"this plan needs {needed.total / GIB:.1f} GiB per process, and {device_name} has "
                    f"{available_bytes / GIB:.1f} GiB for each.\n  It needs, in GiB: {kinds}.\n"
                    + "\n".join(f"  Fits: {way}." for way in fits))  # fmt: skip


def _nearest_that_fit(config: Config, world_size: int, available_bytes: int) -> list[str]:
    """Ways out, each tried against the same estimate: recomputing here, more processes, a smaller model here."""
    ways, opened = [], _opened_keys(config)
    for recomputing, candidate in _with_and_without_recomputing(_on_any_number(config)):
        keys = " ".join(filter(None, (opened, recomputing)))
        for processes in _doublings(world_size, MAX_PROCESSES):
            needed = _need(candidate, processes)
            if needed is not None and needed <= available_bytes:
                place = "here" if processes == world_size else f"{processes} processes with as much memory each"
                ways.append(f"{place}{keys and f', with {keys}'} ({needed / GIB:.1f} GiB each)")
                break
    smaller = _largest_shipped(world_size, available_bytes)
    return [*ways, smaller] if smaller else ways


def _largest_shipped(world_size: int, available_bytes: int) -> str:
    """The largest shipped model that fits, at the longest sequence it fits with."""
    models = sorted(map(load_config, list_configs()), key=lambda c: count_parameters(c.model).total, reverse=True)
    for config in models:
        name = Path(str(config.run.dir)).name
        for keys, candidate in _with_and_without_recomputing(_on_any_number(config)):
            seq_len = config.train.seq_len
            while seq_len >= MIN_SEQ_LEN or seq_len == config.train.seq_len:
                shorter = dataclasses.replace(candidate, train=dataclasses.replace(candidate.train, seq_len=seq_len))
                needed = _need(shorter, world_size)
                if needed is not None and needed <= available_bytes:
                    keys += f" --train.seq_len={seq_len}" if seq_len < config.train.seq_len else ""
                    return " ".join(["here, --config", f"{name}.yaml", *keys.split(), f"({needed / GIB:.1f} GiB each)"])
                seq_len //= 2
    return ""


def _on_any_number(config: Config) -> Config:
    """The same training with degrees and batch left open, so that any number of processes can run it."""
    parallel = dataclasses.replace(config.parallel, plan="manual", strategy=None, dp_replicate="auto", dp_shard="auto")
    micro_batch_size = 1 if config.train.micro_batch_size == "auto" else config.train.micro_batch_size
    train = dataclasses.replace(config.train, micro_batch_size=micro_batch_size, global_batch_size=-1)
    return dataclasses.replace(config, parallel=parallel, train=train)


def _opened_keys(config: Config) -> str:
    """The keys that say what `_on_any_number` changes, as overrides."""
    keys = {"parallel.strategy": (config.parallel.strategy, (None,), "null"),
            "parallel.dp_replicate": (config.parallel.dp_replicate, ("auto", 1), "1"),
            "parallel.dp_shard": (config.parallel.dp_shard, ("auto", -1), "-1"),
            "train.global_batch_size": (config.train.global_batch_size, (-1,), "-1")}  # fmt: skip
    return " ".join(f"--{key}={value}" for key, (asked, same, value) in keys.items() if asked not in same)


def _with_and_without_recomputing(config: Config) -> list[tuple[str, Config]]:
    parallel = dataclasses.replace(config.parallel, activation_checkpoint="full")
    full = dataclasses.replace(config, parallel=parallel)
    return [("", config), ("--parallel.activation_checkpoint=full", full)]


def _need(config: Config, processes: int) -> int | None:
    try:
        return predict_memory(config, plan_run(config, processes)).total
    except PlanError:
        return None


def _doublings(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
