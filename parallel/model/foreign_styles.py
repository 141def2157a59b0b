"""Tensor-parallel styles for models of others: what the caller names, or what the model publishes as
transformers' `_tp_plan`, checked against the modules that would be split."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.rules import STYLE_NAMES, nearest
from meshwright.parallel.plan.schema import innermost

# transformers' word -> our style (transformers/integrations/tensor_parallel.py)
TRANSFORMERS_STYLES = {
    "colwise": "own_colwise",
    "colwise_gather_output": "own_gathered",
    "colwise_rep": "own_gathered",
    "rowwise": "rowwise",
    "rowwise_split_input": "own_rowwise",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "per_head",
}
LEAVE_OUT = "use describe(..., styles={...}), or the key model.styles, without it, or tp=1"


def find_styles(model: nn.Module, styles: Mapping[str, str] | None) -> dict[str, str]:
    """Return the style of each pattern of module names, those that the caller gives or the model publishes.

    Raises PlanError for a style that does not fit a module, and for a pattern that matches none.
    """
    modules = dict(model.named_modules())
    if styles is None:
        # an embedding of which the style would lose something, such as a scaled one, stays whole
        styles = {
            pattern: style
            for pattern, style in _of_transformers(model)
            if style != "vocab"
            or not any(what_is_lost(modules[name], style) for name in fnmatch.filter(modules, pattern))
        }
    kept = {}
    for pattern, style in styles.items():
        if style not in STYLE_NAMES:
            raise PlanError(f"styles: {pattern}: {style} is not a style.{nearest(style, STYLE_NAMES)}")
        names = fnmatch.filter(modules, pattern)
        if not names:
            raise PlanError(f"styles: {pattern} matches no module.{nearest(pattern, modules)}")
        if any(_shared_with_unsplit(model, name, styles) for name in names):
            continue  # a tied weight stays whole, because the other module reads all of it
        for name in names:
            check_style(name, modules[name], style)
        kept[pattern] = style
    return kept


def _of_transformers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the patterns of a transformers model with our styles."""
    published: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    for pattern, word in published.items():
        if word not in TRANSFORMERS_STYLES:
            raise PlanError(
                f"{type(model).__name__}._tp_plan: {pattern}: there is no style for {word!r}: {LEAVE_OUT}"
            )
        yield pattern, TRANSFORMERS_STYLES[word]


def _shared_with_unsplit(model: nn.Module, name: str, styles: Mapping[str, str]) -> bool:
    """Whether a module shares a weight with one that has no style."""
    own = {id(parameter) for parameter in model.get_submodule(name).parameters(recurse=False)}
    return any(
        id(parameter) in own and not any(fnmatch.fnmatchcase(other, pattern) for pattern in styles)
        for other, module in model.named_modules(remove_duplicate=False)
        for parameter in module.parameters(recurse=False)
    )


@dataclass(frozen=True)
class Preserved:
    """What styles preserve of a module: the forward of a class (None: its own, of a norm), parameters by name
    (none: all), and not the attributes in `lost`."""

    of: type[nn.Module] | None
    parameters: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


_LINEAR = Preserved(nn.Linear, ("weight", "bias"))
_EMBEDDING = Preserved(nn.Embedding, ("weight",), lost=("max_norm", "scale_grad_by_freq"))
_NORM = Preserved(None)
PRESERVED = {
    **dict.fromkeys(STYLE_NAMES, _LINEAR),
    **dict.fromkeys(("vocab", "whole_vocab"), _EMBEDDING),
    **dict.fromkeys(("sequence", "whole_sequence", "per_head"), _NORM),
}


def check_style(name: str, module: nn.Module, style: str) -> None:
    """Raise PlanError if a style would compute something else than the module does."""
    if why := what_is_lost(module, style):
        raise PlanError(f"{name} is a {type(module).__name__}, and {style} {why}: {LEAVE_OUT}")


def what_is_lost(module: nn.Module, style: str) -> str:
    """Return why a style would compute something else than the module does; "" if it does not."""
    kept, forward, own = PRESERVED[style], type(module).forward, vars(module)
    if kept.of and forward is not kept.of.forward:
        return f"is for nn.{kept.of.__name__}: its weight's layout or its formula may be another"
    if not kept.of and isinstance(module, nn.RMSNorm) and forward is not nn.RMSNorm.forward:
        return "would use nn.RMSNorm's forward, and not its own: derive it from nn.Module"
    for key, _ in module.named_parameters():
        if "." in key or key not in (kept.parameters or (key,)):
            return f"is for a single norm or layer, without a parameter {key}"
    for key in kept.lost:
        if value := getattr(module, key, None):
            return f"would ignore its {key}={value}"
    if "forward" in own or any(own[key] for key in own if key.startswith(("_forward", "_backward"))):
        return "would ignore its replaced forward, or call its hooks with a part: remove them"
    return ""


def split_share(model: nn.Module, styles: Mapping[str, str], within: Sequence[str] = ("",)) -> float:
    """Return the share of the parameters in some modules that these styles split."""
    patterns = [pattern for pattern, style in styles.items() if style not in ("sequence", "per_head")]
    split = total = 0
    for name, parameter in model.named_parameters():
        if innermost(name, within) is not None:
            module = name.rpartition(".")[0]
            total += parameter.numel()
            split += parameter.numel() * any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)
    return split / max(1, total)


def tp_sizes(model: nn.Module, styles: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes that the tp degree must divide: heads, if the model's config names them, and the split
    dimension of each weight."""
    config = getattr(model, "config", None)
    heads = ("num_attention_heads", "num_key_value_heads")
    sizes = {f"config.{key}": value for key in heads if isinstance(value := getattr(config, key, None), int)}
    for pattern, style in styles.items():
        for name, module in model.named_modules():
            if not fnmatch.fnmatchcase(name, pattern) or style in ("sequence", "per_head"):
                continue
            dim = 1 if style.endswith("rowwise") else 0
            sizes[f"size {dim} of {pattern}.weight"] = module.get_parameter("weight").shape[dim]
    return sizes
