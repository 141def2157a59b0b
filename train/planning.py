"""Config -> plan, and whether it fits: the part of a run that needs no process group and no device."""

import dataclasses
from pathlib import Path

from models.cost import count_parameters, saved_values_per_token
from models.llama import LlamaConfig, fsdp_units
from parallel.plan import ModelUnits, Plan, PlanError, check_plan, make_plan
from parallel.plan_file import load_plan
from parallel.planner.memory import MemoryEstimate, ModelFootprint, estimate_memory
from train.config import Config, ConfigError, list_configs, load_config

GIB = 2**30
MAX_PROCESSES = 65536  # where the search for "how many would do" ends


def plan_run(config: Config, world_size: int) -> Plan:
    """The plan of a run on `world_size` processes: made from the config, or read from the file it names."""
    model = _model_units(config.model)
    if config.parallel.plan == "auto":
        raise PlanError("parallel.plan=auto: this version has no planner yet. Use manual, or the path of a plan file")
    if config.parallel.plan != "manual":
        plan = load_plan(Path(config.parallel.plan))
        check_plan(plan, model, world_size)
        return plan
    return make_plan(config.parallel, model, world_size, config.train.micro_batch_size, config.train.global_batch_size)


def predict_memory(config: Config, plan: Plan) -> MemoryEstimate:
    """Memory of one rank under `plan`."""
    counts, model = count_parameters(config.model), config.model
    block = (counts.block, saved_values_per_token(model), model.dim)
    blocks = (block,) * counts.n_blocks
    if model.tie_embeddings:
        units = (*blocks, (counts.embedding + counts.head, 0, 0))
    else:
        units = ((counts.embedding, 0, 0), *blocks, (counts.head, 0, 0))
    parameters, saved, inputs = zip(*units, strict=True)
    return estimate_memory(plan, ModelFootprint(parameters, saved, inputs, model.vocab_size), config.train.seq_len)


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
    """Ways out, each tried against the same estimate: recomputation here, more processes, a smaller model."""

    def need(candidate: Config, processes: int) -> int | None:
        try:
            return predict_memory(candidate, plan_run(candidate, processes)).total
        except PlanError:
            return None

    def fits(size: int | None) -> bool:
        return size is not None and size <= available_bytes

    ways = []
    parallel = dataclasses.replace(config.parallel, plan="manual", dp_replicate="auto", dp_shard="auto", tp="auto")
    plain = dataclasses.replace(config, parallel=parallel, train=dataclasses.replace(config.train, global_batch_size=-1))
    full = dataclasses.replace(plain, parallel=dataclasses.replace(parallel, activation_checkpoint="full"))
    for way, candidate in (("", plain), ("--parallel.activation_checkpoint=full", full)):
        count = next((n for n in _doublings(world_size) if fits(need(candidate, n))), None)
        if count == world_size and way:
            ways.append(f"here, with {way} ({(need(candidate, count) or 0) / GIB:.1f} GiB)")
        elif count and count > world_size:
            with_way = f" with {way}" if way else ""
            each = f"{(need(candidate, count) or 0) / GIB:.1f} GiB each"
            ways.append(f"{count} processes with as much memory each{with_way} ({each})")
    smaller = [(name, need(candidate, world_size)) for name, candidate in _shipped()]
    best = max(((size, name) for name, size in smaller if size is not None and fits(size)), default=None)
    if best:
        ways.append(f"here, the smaller --config {best[1]} ({best[0] / GIB:.1f} GiB)")
    return ways


def _doublings(first: int) -> list[int]:
    counts = [first]
    while counts[-1] * 2 <= MAX_PROCESSES:
        counts.append(counts[-1] * 2)
    return counts


def _shipped() -> list[tuple[str, Config]]:
    configs = []
    for path in list_configs():
        try:
            configs.append((path.name, load_config(path)))
        except ConfigError:
            continue  # a config the user put there and broke is not a way out
    return configs


def _model_units(config: LlamaConfig) -> ModelUnits:
    blocks = {f"layers.{i}" for i in range(config.n_layers)}
    return ModelUnits(fsdp_units(config), compiled=frozenset(blocks | {"head"}), checkpointed=frozenset(blocks))
