"""Which parameters an optimizer updates how: by their kinds, and by the patterns of `optim.groups`."""

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from meshwright.parallel.config import Kind
from meshwright.parallel.model.kinds import ParameterKind
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.serialize import format_table
from meshwright.train.config import GroupConfig, MuonConfig, OptimConfig
from meshwright.train.errors import ConfigError

By = Literal["muon", "adamw", "yours"]


@dataclass(frozen=True)
class UpdateGroup:
    """Parameters that are updated alike.

    Args:
        by: the optimizer
        weight_decay: decoupled, multiplied by the learning rate of the step
        lr: the peak learning rate
        kinds: of each parameter, by name
    """

    by: By
    weight_decay: float
    lr: float
    kinds: Mapping[str, ParameterKind]

    @property
    def parameters(self) -> int:
        return sum(prod(kind.shape) for kind in self.kinds.values())


def make_groups(kinds: Mapping[str, ParameterKind], config: OptimConfig) -> list[UpdateGroup]:
    """Return the groups of the trained parameters, whose kinds these are; for a function of the user's each
    is of one kind. Decayed are matrices, and all others of two dims or more but embeddings. Raises
    ConfigError for a pattern of `optim.groups` without a match, and for values that cannot be used."""
    rules = {name: _rule(name, config) for name in kinds}
    _check_patterns(kinds, config)
    groups = dict[tuple[By, str, float, float], dict[str, ParameterKind]]()
    for name, found in kinds.items():
        rule = rules[name]
        kind = _as_told(name, found, rule)
        decayed = len(kind.shape) > 1 and kind.kind != "embedding"
        by: By = "yours" if ":" in config.name else "adamw"
        lr = config.lr
        if config.name == "muon":
            by = "muon" if kind.kind == "matrix" else "adamw"
            lr = config.lr if by == "muon" or config.muon.other_lr is None else config.muon.other_lr
        decay = rule.weight_decay if rule.weight_decay is not None else config.weight_decay * decayed
        lr = lr if rule.lr is None else rule.lr
        of_one_kind = kind.kind if by == "yours" else ""
        groups.setdefault((by, of_one_kind, decay, lr), {})[name] = kind
    # those that are decayed first
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] != "muon", -item[0][2]))
    return [UpdateGroup(by, decay, lr, members) for (by, _, decay, lr), members in ordered]


def _rule(name: str, config: OptimConfig) -> GroupConfig:
    """Return what `optim.groups` says of a parameter: each value by the last pattern that has one."""
    found = GroupConfig()
    for pattern, rule in config.groups.items():
        if fnmatch.fnmatchcase(name, pattern):
            said = {key: value for key, value in vars(rule).items() if value not in (None, ())}
            found = dataclasses.replace(found, **said)
    return found


def _check_patterns(kinds: Mapping[str, ParameterKind], config: OptimConfig) -> None:
    for pattern in config.groups:
        if not fnmatch.filter(kinds, pattern):
            raise ConfigError(
                f"optim.groups: {pattern} matches no trained parameter.{nearest(pattern, kinds)}"
            )


def _as_told(name: str, found: ParameterKind, rule: GroupConfig) -> ParameterKind:
    """Return the kind of a parameter with what its rule says of kind and parts. Raises ConfigError if it can
    not be so."""
    kind: Kind = rule.kind or found.kind
    if kind == "matrix" and len(found.shape) not in (2, 3):
        raise ConfigError(
            f"optim.groups: {name} has the shape {list(found.shape)}, but a matrix has 2 dims, or 3 with "
            "experts: use another kind"
        )
    if kind == found.kind and not rule.parts:
        return found
    dim = found.dim if found.kind == "matrix" else len(found.shape) - 2
    if rule.parts and kind != "matrix":
        raise ConfigError(f"optim.groups: parts of {name}, whose kind is {kind}: only a matrix has parts")
    if rule.parts and sum(rule.parts) != found.shape[dim]:
        raise ConfigError(
            f"optim.groups: parts={list(rule.parts)} of {name}, which is {list(found.shape)}, must be sizes "
            f"of matrices that are stored together, which add up to {found.shape[dim]}"
        )
    return dataclasses.replace(found, kind=kind, dim=max(dim, 0), parts=rule.parts or found.parts)


def describe_groups(groups: Sequence[UpdateGroup], config: OptimConfig) -> str:
    """Return a table of the groups: what updates which kinds of parameters, and with which numbers; and what
    their names alone would not tell: matrices that are stored together, and weights of no known kind."""
    head = ("optimizer", "kinds", "tensors", "parameters", "lr", "weight decay")
    rows = []
    for group in groups:
        kinds = ", ".join(dict.fromkeys(kind.kind for kind in group.kinds.values()))
        sizes = (f"{len(group.kinds)}", f"{group.parameters:,}")
        name = config.name if group.by == "yours" else group.by
        rows.append((name, kinds, *sizes, f"{group.lr:g}", f"{group.weight_decay:g}"))
    notes = dict[str, None]()
    for name, kind in ((name, kind) for group in groups for name, kind in group.kinds.items()):
        pattern = re.sub(r"\b\d+\b", "*", name)
        if config.name == "muon" and (kind.kind == "other" or kind.parts):
            runs = [(size, len([*alike])) for size, alike in itertools.groupby(kind.parts)]
            parts = " + ".join(f"{count} x {size}" if count > 1 else f"{size}" for size, count in runs)
            notes[f"{pattern}: {f'matrices of {parts} outputs' if parts else 'of no known kind'}"] = None
    if config.name != "muon" and config.muon != MuonConfig():
        notes["optim.muon is not used: it is of optim.name=muon"] = None
    return "\n".join([format_table(head, rows), *notes])
