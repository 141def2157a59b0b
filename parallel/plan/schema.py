"""The plan: the whole parallelisation of one model on one number of processes, as one frozen value."""

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.parallel.config import CompileConfig
from meshwright.parallel.structure import Count, Integer

AXES = ("dp_replicate", "dp_shard", "tp")  # outermost first: neighbours in tp are neighbours in rank
DTYPES = ("float32", "bfloat16")
ACTIVATION_CHECKPOINTS = ("none", "full", "selective", "budget", "offload")


@dataclass(frozen=True)
class ModelUnits:
    """What a model publishes of itself for planning, all of it names, numbers and plain strings.

    Args:
        modules: name and number of parameters of each module that makes units, in the order in which the
            forward runs them; parameters that are shared count once
        units: modules of each FSDP unit, in the order in which the forward is done with them
        compiled: modules that are compiled
        checkpointed: modules whose activations can be recomputed
        styles: tensor-parallel style of each weight: part of the model -> fqn pattern -> style
        tp_divides: what the tp degree must divide: part of the model -> config key -> value
        shared_parts: parts that share weights, so that all or none of them are split
        attention_ops: operators that attention may be, for selective activation checkpointing
        attention_kernels: names of the kernels that attention has a choice of
        linears: outputs and inputs of the linears inside blocks, by fqn pattern
    """

    modules: Mapping[str, int]
    units: Sequence[tuple[str, ...]]
    compiled: frozenset[str]
    checkpointed: frozenset[str]
    styles: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tp_divides: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    shared_parts: frozenset[str] = frozenset()
    attention_ops: tuple[str, ...] = ()
    attention_kernels: tuple[str, ...] = ("cpu",)
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class MeshPlan:
    """Degrees of the mesh's axes; their product is the number of processes."""

    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different data."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class TensorPlan:
    """Tensor parallelism: the style of each weight by fqn pattern, and how tokens lie between the parts it
    splits.

    `sequence_parallel`: each tp rank holds its share of the tokens; else every rank holds all of them. No
    styles: nothing is split.
    """

    sequence_parallel: bool
    styles: dict[str, str]


@dataclass(frozen=True)
class Float8Plan:
    """Products in float8: the `recipe` (none, tensorwise, rowwise), of which linears, by fqn pattern, and
    whether their weights are sent in it."""

    recipe: str
    linears: tuple[str, ...]
    all_gather: bool


@dataclass(frozen=True)
class UnitPlan:
    """One FSDP unit: the modules whose parameters are gathered together, and how they are treated.

    `forward_prefetch` and `backward_prefetch` say which units' all-gathers are started ahead: how many of the
    next ones, or a list of their names. `output_dtype` is "same" or what the unit's output is cast to.
    `saved_ops` is for activation_checkpoint selective, `activation_budget` for budget.
    """

    modules: tuple[str, ...]
    reshard_after_forward: bool | Integer
    forward_prefetch: Integer | tuple[str, ...]
    backward_prefetch: Integer | tuple[str, ...]
    activation_checkpoint: str
    saved_ops: tuple[str, ...]
    activation_budget: float
    compiled: bool
    param_dtype: str
    reduce_dtype: str
    output_dtype: str

    @property
    def name(self) -> str:
        return "+".join(self.modules)


@dataclass(frozen=True)
class Plan:
    """The parallelisation of one model on one number of processes.

    `storage_dtype`: of sharded parameters and gradients. `attention`: the kernel. `loss_chunk_tokens`: tokens
    whose logits are there at a time; 0 is all. `fused_projections`: one product where several read the same
    input. `async_tp`: tp collectives beside products. `modules`: in the order in which the forward runs them.
    `units`: in the order in which it is done with them.
    """

    mesh: MeshPlan
    micro_batch_size: Count
    accumulation: Count
    tensor: TensorPlan
    cpu_offload: bool
    storage_dtype: str
    attention: str
    loss_chunk_tokens: Integer
    fused_projections: bool
    async_tp: bool
    float8: Float8Plan
    compile: CompileConfig
    modules: tuple[str, ...]
    units: tuple[UnitPlan, ...]

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return self.micro_batch_size * self.accumulation * self.mesh.data_parallel

    @property
    def forward_order(self) -> list[UnitPlan]:
        """Units in the order in which the forward first needs them: tied embeddings come first, though last
        done."""
        place = {module: i for i, module in enumerate(self.modules)}
        return sorted(self.units, key=lambda unit: min(place[module] for module in unit.modules))


def prefetch_schedule(plan: Plan, phase: str) -> dict[str, list[UnitPlan]]:
    """Of every unit, by name: the units whose all-gathers it starts ahead of need in a phase, "forward" or
    "backward", first needed first. A number takes the next units of that phase's order, without those that
    stay gathered."""
    order = plan.forward_order if phase == "forward" else list(plan.units)[::-1]
    by_name = {unit.name: unit for unit in order}
    schedule = {}
    for i, unit in enumerate(order):
        asked = unit.forward_prefetch if phase == "forward" else unit.backward_prefetch
        if isinstance(asked, int):
            following = (other for other in order[i + 1 :] if phase == "forward" or regathered(other))
            schedule[unit.name] = list(itertools.islice(following, asked))
        else:
            schedule[unit.name] = [by_name[name] for name in asked]
    return schedule


def regathered(unit: UnitPlan) -> bool:
    """Whether the backward has to gather the unit again."""
    return unit.reshard_after_forward is not False


def find_style(plan: TensorPlan, module: str) -> str:
    """The style of a module by its name; "" if the table does not mention it."""
    return next((style for pattern, style in plan.styles.items() if fnmatch.fnmatchcase(module, pattern)), "")
