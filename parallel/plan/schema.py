"""The plan: the complete parallelization of one model on one number of processes, as a frozen dataclass."""

import fnmatch
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from meshwright.parallel.config import (
    ActivationCheckpoint,
    CompileConfig,
    Dtype,
    Exchange,
    Recipe,
    ReduceGradients,
)
from meshwright.parallel.structure import OPTIONAL, Count, Integer, Natural, Share

AXES = ("dp_replicate", "dp_shard", "cp", "tp")  # outermost first: neighbors in tp have consecutive ranks
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
REDUCE_GRADIENTS: tuple[ReduceGradients, ...] = get_args(ReduceGradients)
CP_EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
ROOT = "(root)"  # in names and files: the model itself, whose own name is ""


@dataclass(frozen=True)
class ModelUnits:
    """The description of a model for planning: only names, numbers and plain strings.

    Args:
        modules: name and number of parameters of each module that units consist of, in the order in which the
            forward begins with them; shared parameters count once. A module that contains others has only the
            parameters outside of them; "" is the model itself
        units: modules of each FSDP unit, in the order in which the forward finishes with them
        compiled: modules that are compiled
        checkpointed: modules that support activation checkpointing
        styles: tensor-parallel style of each weight: part of the model -> fqn pattern -> style
        tp_divides: sizes that the tp degree must divide: part of the model -> config key -> value
        tp_share: share of the parameters that the styles of a model of others split
        shared_parts: parts that share weights, so that all or none of them are split
        attention_ops: the operators of the attention kernels, for selective activation checkpointing
        attention_kernels: names of the attention kernels; none for a model whose kernel is its own business
        attention_cores: the modules, by fqn pattern, that take queries, keys and values to attention's
            output, around which context parallelism exchanges them; none: only one rank can hold a sequence
        core_heads: key-value heads of a core, by config key
        shifted_kernels: attention kernel -> the kernel in its place that takes fewer queries than keys, those
            of the last tokens
        why_no_cores: why context parallelism cannot be used with this model
        unsharded: parameters that every rank keeps whole
        linears: (outputs, inputs) of the linears inside blocks, by fqn pattern
        why_no_styles: why the split that the model publishes cannot be used
        written: buffers that the forward writes, of which every rank would have its own
    """

    modules: Mapping[str, int]
    units: Sequence[tuple[str, ...]]
    compiled: frozenset[str]
    checkpointed: frozenset[str]
    styles: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tp_divides: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tp_share: float = 1.0
    shared_parts: frozenset[str] = frozenset()
    attention_ops: tuple[str, ...] = ()
    attention_kernels: tuple[str, ...] = ("cpu",)
    attention_cores: tuple[str, ...] = ()
    core_heads: Mapping[str, int] = field(default_factory=dict)
    shifted_kernels: Mapping[str, str] = field(default_factory=dict)
    why_no_cores: str = ""
    unsharded: tuple[str, ...] = ()
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    why_no_styles: str = ""
    written: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[str, ...]:
        """The modules that support activation checkpointing, in the order of `modules`, which have not those
        of which every rank keeps all parameters whole."""
        places = {name: place for place, name in enumerate(self.modules)}
        return tuple(sorted(self.checkpointed, key=lambda name: (places.get(name, len(places)), name)))


@dataclass(frozen=True)
class MeshPlan:
    """Degrees of the mesh axes; their product is the number of processes."""

    dp_replicate: Count
    dp_shard: Count
    tp: Count
    cp: Count = 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.shards * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of parts of the global batch: a part is read by the ranks of one cp x tp."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Number of ranks that FSDP shards parameters over: dp_shard x cp, because the ranks of cp compute
        with the same parameters, as those of dp_shard do."""
        return self.dp_shard * self.cp

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes to name: cp only if it is used."""
        return tuple(axis for axis in AXES if axis != "cp" or self.cp > 1)


@dataclass(frozen=True)
class TensorPlan:
    """Tensor parallelism. `sequence_parallel`: between split parts each tp rank holds a share of the tokens,
    else all of them; `styles`: of each weight, by fqn pattern; empty: nothing is split."""

    sequence_parallel: bool
    styles: dict[str, str]


@dataclass(frozen=True)
class ContextPlan:
    """Context parallelism.

    Args:
        exchange: what ranks exchange around attention. "heads": all tokens of a share of the heads, by
            all-to-all; "gather": all keys and values, by all-gather
        cores: attention's cores, by fqn pattern; empty: each rank holds whole sequences
    """

    exchange: Exchange = "heads"
    cores: tuple[str, ...] = ()


@dataclass(frozen=True)
class Float8Plan:
    """Products in float8, of `linears` by fqn pattern. `all_gather`: gather their weights in float8 too."""

    recipe: Recipe
    linears: tuple[str, ...]
    all_gather: bool


@dataclass(frozen=True)
class UnitPlan:
    """One FSDP unit: the modules whose parameters are gathered together, and its settings.

    Args:
        unshard_in_backward: false if the backward of the modules does not read their weights, as of an
            embedding: they are then not gathered for it
        reshard_after_backward: false keeps the gathered parameters from one micro batch to the next, until
            the last of a step
        reduce_gradients: last_micro_batch: whole gradients are summed on every rank until then
        forward_prefetch, backward_prefetch: units whose all-gathers this unit starts early: the number of
            next units, or a list of names
        saved_ops: for activation_checkpoint=selective
        activation_budget: for activation_checkpoint=budget
        output_dtype: the dtype to which the unit's output is cast
    """

    modules: tuple[str, ...]
    reshard_after_forward: bool | Integer
    unshard_in_backward: bool
    reshard_after_backward: bool
    reduce_gradients: ReduceGradients
    forward_prefetch: Natural | tuple[str, ...]
    backward_prefetch: Natural | tuple[str, ...]
    activation_checkpoint: ActivationCheckpoint
    saved_ops: tuple[str, ...]
    activation_budget: Share
    compiled: bool
    param_dtype: Dtype
    reduce_dtype: Dtype
    output_dtype: Literal["same", Dtype]

    @cached_property
    def name(self) -> str:
        """The names of the modules, joined by "+"."""
        return "+".join(module or ROOT for module in self.modules)

    @cached_property
    def settings(self) -> tuple[Any, ...]:
        """All but the modules: the same for units that differ only in these."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "modules")


@dataclass(frozen=True)
class Plan:
    """The parallelization of one model on one number of processes.

    Args:
        accumulation: micro batches per optimizer step
        storage_dtype: of sharded parameters and gradients
        attention: the kernel; "" for a model without a choice
        loss_chunk_tokens: tokens whose logits exist at the same time; 0 is all
        fused_projections: one product for projections that read the same input
        async_tp: overlap tp collectives with the products next to them
        modules: in the order in which the forward begins with them
        units: in the order in which the forward finishes with them
        unsharded: parameters that every rank keeps whole
        blocks: modules that repeat, as `ModelUnits.checkpointed`: matrices inside of them are Muon's
    """

    mesh: MeshPlan
    micro_batch_size: Count
    accumulation: Count
    tensor: TensorPlan
    context: ContextPlan = field(default=ContextPlan(), kw_only=True)
    cpu_offload: bool
    storage_dtype: Dtype
    attention: str
    loss_chunk_tokens: Natural
    fused_projections: bool
    async_tp: bool
    float8: Float8Plan
    compile: CompileConfig
    modules: tuple[str, ...]
    unsharded: tuple[str, ...] = field(default=(), kw_only=True)
    blocks: tuple[str, ...] = field(default=(), kw_only=True, metadata=OPTIONAL)
    units: tuple[UnitPlan, ...]

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return self.micro_batch_size * self.accumulation * self.mesh.data_parallel

    @property
    def forward_order(self) -> list[UnitPlan]:
        """Units in the order in which the forward first needs them. Tied embeddings come first, although the
        forward finishes with them last."""
        place = {module: i for i, module in enumerate(self.modules)}
        return sorted(self.units, key=lambda unit: min(place[module] for module in unit.modules))


def join(name: str, child: str) -> str:
    """Return the name of a module's child, parameter or buffer."""
    return f"{name}.{child}" if name else child


def innermost(name: str, modules: Collection[str]) -> str | None:
    """Return the innermost of these modules that a module or parameter is in, or is; None: it is in none."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name if name in modules else None


@cache
def last_places(modules: tuple[str, ...]) -> Mapping[str, int]:
    """Return the place at which the forward finishes with each module: its own, or that of the last module in
    it. `modules`: in the order in which the forward begins with them."""
    last = dict[str, int]()
    for place, name in enumerate(modules):
        around: str | None = name
        while around is not None:
            last[around] = place
            around = innermost(around.rpartition(".")[0], last) if around else None
    return last


def without_containers(modules: Iterable[str]) -> list[str]:
    """Return the modules that contain no others: all that a unit computes is computed by these."""
    modules = tuple(modules)
    last = last_places(modules)
    return [name for place, name in enumerate(modules) if last[name] == place]


def ends_forward(modules: Iterable[str], of_model: Iterable[str]) -> bool:
    """Whether the forward finishes with one of these modules last, so that its unit is the backward's first:
    resharding it in between would gather it twice in a row."""
    last = last_places(tuple(of_model))
    return any(last.get(name) == len(last) - 1 for name in modules)


@dataclass(frozen=True)
class MicroBatch:
    """The place of a micro batch in its optimizer step."""

    first: bool
    last: bool


def micro_batch_kinds(plan: Plan) -> list[tuple[MicroBatch, int]]:
    """Return the kinds of micro batches of a step in order, each with its number: the first, those in
    between, which are alike, and the last. The first is like those in between, and without replicas the last
    too, unless something is kept from one micro batch to the next."""
    number, first, last = plan.accumulation, MicroBatch(True, False), MicroBatch(False, True)
    between = MicroBatch(False, False)
    if number == 1:
        return [(MicroBatch(True, True), 1)]
    kept = (sums_whole_gradients(unit, plan) or keeps_parameters(unit, plan) for unit in plan.units)
    if leaves_parameters(plan) or any(kept):
        return [(first, 1), *([(between, number - 2)] if number > 2 else []), (last, 1)]
    return [(between, number - 1), (last, 1)] if plan.mesh.dp_replicate > 1 else [(last, number)]


def sums_whole_gradients(unit: UnitPlan, plan: Plan) -> bool:
    """Whether every rank sums the unit's whole gradients over the micro batches of a step."""
    return plan.accumulation > 1 and unit.reduce_gradients == "last_micro_batch"


def reduced_in(unit: UnitPlan, plan: Plan) -> Dtype:
    """Return the dtype in which a unit's gradients are reduced, or summed over micro batches: reduce_dtype,
    but one data-parallel rank, which does neither, keeps param_dtype."""
    alone = plan.mesh.data_parallel * plan.mesh.cp == 1
    return unit.param_dtype if alone and not sums_whole_gradients(unit, plan) else unit.reduce_dtype


def leaves_parameters(plan: Plan) -> bool:
    """Whether FSDP2 leaves all parameters to their modules: one rank has nothing to shard or reduce, and if
    parameters and gradients are used on the device and in the dtype in which they are stored, FSDP2 would
    only copy them. Ranks of tp keep it: it makes DTensors of all parameters and sums gradients over tp."""
    return (
        plan.mesh.world_size == 1
        and not plan.cpu_offload
        and all(unit.param_dtype == plan.storage_dtype == reduced_in(unit, plan) for unit in plan.units)
    )


def gathers_in_float8(plan: Plan) -> bool:
    """Whether weights are all-gathered in float8: one data-parallel rank gathers none."""
    return plan.float8.all_gather and not leaves_parameters(plan)


def keeps_parameters(unit: UnitPlan, plan: Plan) -> bool:
    """Whether the unit's gathered parameters are kept from one micro batch to the next. If its forward
    reshards them, that is only so after a backward that gathers them again."""
    return (
        plan.accumulation > 1
        and not unit.reshard_after_backward
        and (unit.unshard_in_backward or unit.reshard_after_forward is False)
    )


def prefetch_schedule(plan: Plan, phase: str) -> dict[str, list[UnitPlan]]:
    """Return, for every unit by name, the units whose all-gathers it starts early in a phase, in the order in
    which the phase needs them.

    `phase`: "forward" or "backward". A number stands for the next units in the order of that phase; in the
    backward, units that it does not gather are skipped.
    """
    order = plan.forward_order if phase == "forward" else list(plan.units)[::-1]
    by_name = {unit.name: unit for unit in order}
    schedule = {}
    for i, unit in enumerate(order):
        prefetch = unit.forward_prefetch if phase == "forward" else unit.backward_prefetch
        if isinstance(prefetch, int):
            following = (other for other in order[i + 1 :] if phase == "forward" or regathered(other))
            schedule[unit.name] = list(itertools.islice(following, prefetch))
        else:
            schedule[unit.name] = [by_name[name] for name in prefetch]
    return schedule


def regathered(unit: UnitPlan) -> bool:
    """Whether the backward must gather the unit again."""
    return unit.unshard_in_backward and unit.reshard_after_forward is not False


def only_look_up(modules: Sequence[str], model: ModelUnits) -> bool:
    """Whether all modules are embeddings by the model's styles. The gradient of an embedding needs the token
    ids only, not the weight."""
    patterns = [p for table in model.styles.values() for p, style in table.items() if style == "vocab"]
    return all(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in modules)


def find_style(plan: TensorPlan, module: str) -> str:
    """Return the style of a module by its name; "" if the table does not contain it."""
    return next((style for pattern, style in plan.styles.items() if fnmatch.fnmatchcase(module, pattern)), "")


@runtime_checkable
class ShardableModel(Protocol):
    """The interface between a model and `parallel/`, apart from the data of its `ModelUnits`: a model that
    describes itself and has selectable kernels. `describe` reads all others from their modules.

    A block that draws no random numbers says so by the class attribute `draws_random_numbers = False`; its
    recomputation then saves no random state. Modules may have two methods. `matrix() -> Tensor`, of a linear
    layer whose weight other modules read, returns the weight; tensor parallelism overrides it with this
    rank's shard. `split_vocabulary(group_name, rank)`, of the loss (a module of style "loss"), is called if
    logits are split over the vocabulary; they are then this rank's share.
    """

    def sharding(self) -> Mapping[str, Any]:
        """Return the fields of a `ModelUnits`; of `modules` only the names, in the order of the forward."""

    def choose_kernels(self, attention: str, loss_chunk_tokens: int, fused_projections: bool) -> None:
        """Set the attention kernel (of `ModelUnits.attention_kernels`), the tokens per chunk of logits (0: no
        chunks), and whether projections of the same input are fused into one matrix product."""
