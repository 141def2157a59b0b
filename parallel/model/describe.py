"""Describes a model for planning: its FSDP units in the order of its forward, and how tensor parallelism
splits its weights.

A model that publishes a description (`ShardableModel`) is taken at its word. Of any other model the blocks,
the modules around them and shared weights are read from the module itself, and the order from one forward of
an example without computation.
"""

import fnmatch
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import names_by_parameter, refuse_planned
from meshwright.parallel.model.attention_cores import find_cores
from meshwright.parallel.model.foreign_styles import find_styles, split_share, tp_sizes
from meshwright.parallel.model.forward import Example, Observed, observe, run_on_fakes
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.schema import (
    ModelUnits,
    ShardableModel,
    innermost,
    join,
    last_places,
    without_containers,
)

Blocks = str | type[nn.Module] | int
# torch's own fused attention, whose results selective activation checkpointing keeps
ATTENTION_OPS = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)
WAY_OUT = (
    "name them: describe(model, example, blocks=...), or the key model.blocks, takes a pattern of names or a "
    "number of parameters"
)
SMALL_LIST = 0.05  # share of the parameters of the largest list
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # they cannot be called


def describe(
    model: nn.Module,
    example: Example | None = None,
    *,
    blocks: Blocks | None = None,
    units: Sequence[str] = (),
    unsharded: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> ModelUnits:
    """Describe a model on any device, also meta.

    Args:
        example: arguments of one forward, of which only shapes and dtypes count; None: modules run in the
            order in which they were registered
        blocks: the modules that each become a unit and are compiled and recomputed one by one: a pattern of
            names such as "encoder.layers.*", a class, or a number of parameters (the smallest modules that
            have so many, as FSDP1's size-based wrapping). None: the classes in `_no_split_modules`, or else
            the elements of the model's outermost lists (docs/your-model.md)
        units: patterns of modules inside blocks that become units of their own; their block is then not
            compiled as a whole
        unsharded: patterns of parameters that every rank keeps whole, in the dtype in which they are stored;
            scalars always are
        styles: tensor-parallel styles by pattern of module names (docs/your-model.md); None: what the model
            publishes as `_tp_plan`, or none if that cannot be used; {}: none

    Raises PlanError, which names the module and a way out, for what cannot be described.
    """
    if isinstance(model, ShardableModel):
        return _published(model)
    refuse_planned(model)
    refuse_switches(model)
    found = find_blocks(model, blocks)
    finer = _matching(model, units, "units")
    whole = _unsharded(model, unsharded)
    observed = observe(model, example) if example is not None else _as_registered(model)
    owners = _owners(model, [*found, *finer], whole, observed)
    groups = _in_order(owners, observed.finished, {*found, *finer})
    modules = _count(model, _as_they_begin(list(itertools.chain(*groups))), owners)
    split, why_not = _styles(model, styles, found)
    cores, why_no_cores = find_cores(model)
    nested = {block for block in found if any(name.startswith(f"{block}.") for name in finer)}
    return ModelUnits(
        modules=modules,
        units=_join_shared(model, groups, owners),
        compiled=frozenset({*found, *finer} - nested),
        checkpointed=frozenset(found),
        styles={"model": split} if split else {},
        tp_divides={"model": tp_sizes(model, split)} if split else {},
        tp_share=split_share(model, split) if split else 1.0,
        attention_kernels=(),
        attention_ops=ATTENTION_OPS,
        unsharded=tuple(whole),
        why_no_styles=why_not,
        attention_cores=cores,
        core_heads=_core_heads(model, example, cores),
        why_no_cores=why_no_cores,
        written=observed.written,
    )


def _styles(
    model: nn.Module, styles: Mapping[str, str] | None, blocks: Sequence[str]
) -> tuple[dict[str, str], str]:
    """Return the tensor-parallel styles; and why there are none if the model publishes a split that cannot be
    used, or that splits no block, which is a mistake only in a plan with tp."""
    try:
        found = find_styles(model, styles)
    except PlanError as error:
        if styles is not None:
            raise
        return {}, str(error)
    if styles is None and found and not split_share(model, found, blocks):
        names = ", ".join(found)
        return {}, f"the model's _tp_plan splits {names} and no block: every tp rank would compute all"
    return found, ""


def _core_heads(model: nn.Module, example: Example | None, cores: Sequence[str]) -> dict[str, int]:
    """Return the key-value heads of attention's cores, by key of transformers' config or by name."""
    config, found = getattr(model, "config", None), dict[str, int]()
    for key in ("num_key_value_heads", "num_attention_heads"):
        if cores and (heads := getattr(config, key, None)):
            return {f"config.{key}": heads}

    def count(name: str) -> Any:
        return lambda core, args: found.update({f"key-value heads of {name}": args[1].shape[2]})

    parts = [(n, m) for n, m in model.named_modules() if any(fnmatch.fnmatchcase(n, core) for core in cores)]
    if parts and example is not None:
        with ExitStack() as hooks, torch.no_grad():
            for name, module in parts:
                hooks.enter_context(module.register_forward_pre_hook(count(name)))
            run_on_fakes(model, example)
    return found


def _published(model: ShardableModel) -> ModelUnits:
    """Return the description that the model publishes, with the number of parameters of each module."""
    published = model.sharding()
    units = published["units"]
    assert isinstance(model, nn.Module)
    owners = {
        name: next(unit for unit in itertools.chain(*units) if name == unit or name.startswith(f"{unit}."))
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    counts = _count(model, published["modules"], owners)
    return ModelUnits(**{**published, "modules": counts})


def refuse_switches(model: nn.Module) -> None:
    """Refuse a cache of keys and values, the model's own activation checkpointing, and some embeddings."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        raise PlanError(
            f"{type(model).__name__}: config.use_cache=True keeps keys and values for generation, which a "
            "recomputed or compiled block would write twice: set model.config.use_cache = False"
        )
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            raise PlanError(
                f"{name or type(model).__name__}: the model's own gradient checkpointing is on: turn it off "
                "(gradient_checkpointing_disable()), and use the plan's activation_checkpoint"
            )
        if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm):
            what = "sparse gradients" if module.sparse else "max_norm, which writes a weight that is not kept"
            raise PlanError(f"{name}: an embedding that is sharded cannot have {what}: leave it out")


def find_blocks(model: nn.Module, blocks: Blocks | None = None) -> list[str]:
    """Return the names of the model's blocks. Raises PlanError if there are none."""
    match blocks:
        case str():
            found = _matching(model, [blocks], "blocks")
        case bool():
            raise PlanError(f"blocks={blocks}: {WAY_OUT}")
        case int():
            found = list(_of_size(model, blocks))
        case type():
            found = _outermost(name for name, module in model.named_modules() if isinstance(module, blocks))
        case _:
            found = _by_class_name(model) or _of_lists(model)
    found = [each for name in found for each in _callable(name, model.get_submodule(name))]
    if not found:
        what = f"blocks={blocks!r} matches no module" if blocks is not None else "no list of equal blocks"
        raise PlanError(f"{type(model).__name__}: {what}: {WAY_OUT}")
    return found


def _by_class_name(model: nn.Module) -> list[str]:
    """Return the modules of the classes that transformers' models name in `_no_split_modules`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return _outermost(name for name, module in model.named_modules() if type(module).__name__ in names)


def _of_lists(model: nn.Module) -> list[str]:
    """Return the elements of the outermost lists: of that with the most parameters, and of others of the same
    classes or that are not small beside it, such as a decoder's beside an encoder's."""
    lists = {tuple(names): sum(map(_size, parts)) for names, parts in _outermost_lists("", model)}
    if not lists:
        return []
    largest = max(lists, key=lists.__getitem__)
    kinds = {type(model.get_submodule(name)) for name in largest}
    return [
        name
        for names, size in lists.items()
        if size >= SMALL_LIST * lists[largest] or kinds.issuperset(map(type, map(model.get_submodule, names)))
        for name in names
    ]


def _outermost_lists(name: str, module: nn.Module) -> Iterator[tuple[list[str], list[nn.Module]]]:
    """Yield names and modules of the elements of each ModuleList or Sequential that have parameters and whose
    class occurs twice in it, or that are alone; lists inside of such elements are not looked for."""
    children = {join(name, key): child for key, child in module.named_children() if _size(child)}
    kinds = Counter(map(type, module)) if isinstance(module, nn.ModuleList | nn.Sequential) else Counter()
    elements = {k: child for k, child in children.items() if kinds[type(child)] > 1 or kinds.total() == 1}
    if elements:
        yield [*elements], [*elements.values()]
    for key, child in children.items():
        if key not in elements:
            yield from _outermost_lists(key, child)


def _callable(name: str, module: nn.Module) -> Iterator[str]:
    """Yield a module's name, or for a container, which has no forward, those of the modules in it."""
    if not isinstance(module, CONTAINERS):
        yield name
    for key, child in module.named_children() if isinstance(module, CONTAINERS) else ():
        yield from _callable(join(name, key), child) if _size(child) else ()


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _of_size(model: nn.Module, least: int) -> Iterator[str]:
    """Yield the smallest modules with `least` parameters that are in no other such module below them."""
    if least < 1:
        raise PlanError(f"blocks={least} must be at least 1: a number of parameters")

    def walk(name: str, module: nn.Module) -> Iterator[str]:
        inside = [found for child, part in module.named_children() for found in walk(join(name, child), part)]
        yield from inside
        if not inside and name and _size(module) >= least and not isinstance(module, CONTAINERS):
            yield name

    yield from walk("", model)


def _outermost(names: Iterator[str]) -> list[str]:
    kept: list[str] = []
    for name in names:
        if not any(name.startswith(f"{other}.") for other in kept):
            kept.append(name)
    return kept


def _matching(model: nn.Module, patterns: Sequence[str], option: str) -> list[str]:
    """Return the modules whose names match; every pattern must match one."""
    names = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    ]
    found = []
    for pattern in patterns:
        matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        depth = min((name.count(".") for name in matches), default=0)
        if not matches:
            hint = nearest(pattern, names)
            raise PlanError(f"{option}={pattern!r} matches no module with parameters.{hint}")
        found += [name for name in matches if name.count(".") == depth]  # `*` matches dots too
    return found


def _unsharded(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the parameters that stay whole, by any name of a shared one: those that match, and
    scalars, which cannot be sharded."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not fnmatch.filter(named, pattern):
            raise PlanError(f"unsharded={pattern!r} matches no parameter.{nearest(pattern, named)}")
    chosen = {
        id(parameter)
        for name, parameter in named.items()
        if not parameter.dim() or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    return [name for name, parameter in named.items() if id(parameter) in chosen]


def _as_registered(model: nn.Module) -> Observed:
    """Return the forward of a model that calls its modules in the order in which they are registered."""
    last = last_places(tuple(name for name, _ in model.named_modules()))
    called = (name for name, module in model.named_modules() if not isinstance(module, CONTAINERS))
    return Observed(sorted(called, key=lambda name: (last[name], -len(name))))


def _owners(
    model: nn.Module, chosen: Sequence[str], whole: Sequence[str], observed: Observed
) -> dict[str, str]:
    """Return the module of a unit that each sharded parameter belongs to, by its names: the innermost of the
    `chosen`, or outside of them the module that has it, or the next one around that is called, at last the
    model itself, "". To the model belong too the parameters that are read while none of their modules runs,
    with the rest of these modules, unless one is chosen. Names of a parameter in modules that are not called
    are left out if a called module has it too.
    """
    called = {*chosen, *observed.finished}
    owners, of_root = dict[str, str](), {""}
    for names in names_by_parameter(model).values():
        if names[0] in whole:
            continue
        own = {name: innermost(name, chosen) or name.rpartition(".")[0] for name in names}
        own = {name: owner for name, owner in own.items() if owner in called} or {
            name: innermost(name, called) or "" for name in names
        }
        modules, reads = {*own.values()}, (observed.reads.get(name, set()) for name in names)
        read_elsewhere = any(map(modules.isdisjoint, set[frozenset[str]]().union(*reads)))
        if "" in modules or (read_elsewhere and modules.isdisjoint(chosen)):
            of_root |= modules
        owners |= own
    if blocks := sorted(of_root.intersection(chosen)):
        raise PlanError(
            f"{blocks[0]} cannot be a block: the model itself has one of its parameters too: use other "
            "blocks, or keep the parameter whole: describe(unsharded=...), or the key model.unsharded"
        )
    return {name: "" if owner in of_root else owner for name, owner in owners.items()}


def _as_they_begin(modules: Sequence[str]) -> list[str]:
    """Return modules, given as the forward finishes with them, as it begins with them: one that contains
    others before these."""
    first: dict[str, int] = {}
    for place, name in enumerate(modules):
        parts = name.split(".")
        for end in range(len(parts) + 1):
            first.setdefault(".".join(parts[:end]), place)
    return sorted(modules, key=lambda name: (first[name], len(name)))


def _in_order(owners: Mapping[str, str], order: Sequence[str], alone: set[str]) -> list[tuple[str, ...]]:
    """Return the modules of each unit in the order in which the forward finishes with them: those in `alone`
    are units of their own, modules before, between and after them units together. A module that contains
    others is a unit of its own too."""
    names = set(owners.values())
    if missing := sorted((names & alone) - set(order)):
        raise PlanError(
            f"{missing[0]} is never called by the example: use an example that calls it, or other blocks"
        )
    containers = names.difference(without_containers(sorted(names)))
    groups: list[tuple[str, ...]] = []
    for name in (name for name in order if name in names):
        joins = groups and not {name, *groups[-1]} & (alone | containers)
        groups = [*groups[:-1], (*groups[-1], name)] if joins else [*groups, (name,)]
    return groups


def _join_shared(
    model: nn.Module, groups: Sequence[tuple[str, ...]], owners: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Return the groups; those that share a parameter, which has one unit, are joined in the last's place."""
    group_of = {name: i for i, group in enumerate(groups) for name in group}
    last: dict[int, int] = {}

    def root(i: int) -> int:
        return i if last.get(i, i) == i else root(last[i])

    for names in names_by_parameter(model).values():
        places = sorted({root(group_of[owners[name]]) for name in names if name in owners})
        for place in places[:-1]:
            last[place] = places[-1]
    joined: dict[int, tuple[str, ...]] = {}
    for i, group in enumerate(groups):
        joined[root(i)] = (*joined.get(root(i), ()), *group)
    return [joined[i] for i in sorted(joined)]


def _count(model: nn.Module, modules: Sequence[str], owners: Mapping[str, str]) -> dict[str, int]:
    """Return the number of parameters that each module owns; shared ones count once."""
    counts = dict.fromkeys(modules, 0)
    for parameter, names in names_by_parameter(model).items():
        if owned := [owners[name] for name in names if name in owners]:
            counts[owned[0]] += parameter.numel()
    return counts
