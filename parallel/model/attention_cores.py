"""Attention's cores in models of others, for context parallelism: modules that the model's class names, or
the attention of transformers' models, whose function is looked up in a registry.

    class Model(nn.Module):
        attention_cores = ("blocks.*.core",)

A core takes q[B, t, N, H], k and v[B, t, K, H], and gives causal attention [B, t, N, H]. The model's forward
takes the positions of its tokens in their sequences, under one of the names in POSITIONS.

Shapes: B batch, t tokens of a rank, N query heads, K key-value heads, H head dim.
"""

import copy
import fnmatch
import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.rules import nearest

POSITIONS = ("position_ids", "positions")
REGISTERED = "meshwright_context"  # our function's name in transformers' registry
# attention -> what a core computes
Around = Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor, Any], Tensor]


def position_argument(model: nn.Module) -> str:
    """Return the name under which a model's forward takes positions; "" if it takes none."""
    given = inspect.signature(model.forward).parameters
    return next((name for name in POSITIONS if name in given), "")


def find_cores(model: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return patterns of the names of attention's cores; or none, and why. Raises PlanError if the model's
    class names modules that the model does not have."""
    named, modules = getattr(model, "attention_cores", None), dict(model.named_modules())
    for pattern in named or ():
        if not fnmatch.filter(modules, pattern):
            raise PlanError(f"attention_cores: {pattern} matches no module.{nearest(pattern, modules)}")
    attentions = tuple(name for name, module in modules.items() if in_registry(module))
    why = ""
    if named is None and not attentions:
        why = (
            "nothing says where its attention is: let its class name the modules that take queries, keys and "
            'values, such as attention_cores = ("blocks.*.core",)'
        )
    elif not position_argument(model):
        why = (
            "its forward takes no positions, and those of a rank's tokens are not 0 to the last: give it an "
            f"argument {' or '.join(POSITIONS)}"
        )
    elif named is None:
        why = _more_than_causal(model)
    if why:
        return (), why
    numbered = named if named is not None else (re.sub(r"\.\d+\.", ".*.", name) for name in attentions)
    return tuple(dict.fromkeys(numbered)), ""


def in_registry(module: nn.Module) -> bool:
    """Whether a module is attention as transformers writes it: with a config that names the function."""
    named = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return named is not None and hasattr(module, "is_causal") and hasattr(module, "scaling")


def _more_than_causal(model: Any) -> str:
    """Return what the attention of a transformers model is besides causal; "" if nothing."""
    config = model.config
    types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    attentions = [module for module in model.modules() if in_registry(module)]
    if not all(module.is_causal for module in attentions):
        return "some of its attention is not causal"
    windows = any(getattr(module, "sliding_window", None) for module in attentions)
    if types or windows or (getattr(config, "sliding_window", None) and not hasattr(config, "layer_types")):
        return "its layers do not attend to all earlier tokens (config.layer_types, config.sliding_window)"
    if config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return f"its attention is {config._attn_implementation}, and not sdpa of transformers' registry"
    if getattr(config, "attention_dropout", 0.0):
        return "config.attention_dropout would draw other numbers on every rank: set it to 0"
    return ""


def exchange_in_registry(
    model: Any, attentions: Sequence[Any], around: Around, whole: Callable[[Tensor], Tensor]
) -> None:
    """Let the attentions of a transformers model compute within `around`, in place, with masks of whole
    sequences. `whole`: x[B, t] of a rank's tokens -> [B, T]. The config is copied: other models may share it.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(REGISTERED, _attention)
    configs = {id(attention.config): attention.config for attention in attentions}
    copies = copy.deepcopy(configs)
    for config in copies.values():
        config._attn_implementation = REGISTERED  # a function for which transformers makes no mask
    for module in model.modules():
        if (key := id(getattr(module, "config", None))) in copies:
            module.config = copies[key]
    for attention in attentions:
        attention.around = around
    models = [module for module in model.modules() if hasattr(module, "_supports_attention_backend")]
    # the innermost make the masks
    for maker in {next(m for m in reversed(models) if a in m.modules()) for a in attentions}:
        hook = partial(_mask_whole_sequences, next(iter(configs.values())), whole)
        maker.register_forward_pre_hook(hook, with_kwargs=True)


def _mask_whole_sequences(
    config: Any, whole: Callable[[Tensor], Tensor], model: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Forward pre-hook of a transformers model: in place of this rank's attention_mask[B, t] give the mask of
    whole sequences, or none if they are only causal. As without cp, positions that begin again mean packed
    sequences if there is no attention_mask."""
    from transformers.masking_utils import create_causal_mask

    given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    mask, positions = given.get("attention_mask"), given.get(position_argument(model))
    dims = None if mask is None else getattr(mask, "ndim", 0)
    if getattr(positions, "ndim", 0) != 2 or dims not in (None, 2, 4):
        raise PlanError(
            f"with cp {type(model).__name__} needs {position_argument(model)}[B, t] of this rank's tokens "
            "(sharded.token_positions), and takes an attention_mask[B, t] of them, or [B, 1, T, T]"
        )
    if dims != 4:
        of_all = whole(positions if mask is None else mask.long())
        known = not isinstance(of_all, FakeTensor)  # its values
        padding, packed = (None, of_all if known else None) if mask is None else (of_all, None)
        sizes = of_all.new_empty(*of_all.shape, 0)  # of embeddings
        given["attention_mask"] = create_causal_mask(config, sizes, padding, None, packed)
    return (), given


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers' functions: query[B, N, t, H], key and value[B, K, t, H], mask[B, 1, T, T] or none for
    causal attention -> [B, t, N, H]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa_attention_forward(module, q, k, v, mask, **{**options, "is_causal": True})[0]

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return module.around(attend, q, k, v, attention_mask), None
