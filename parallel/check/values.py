"""Values and rows on which a sharded model and its unsharded twin are compared, and their outputs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.parallel.fsdp import full_tensor
from meshwright.parallel.model.forward import Example
from meshwright.parallel.model.parts import call

MOVED = 0.05  # standard deviation by which weights are moved, as a share of their own, at least


def moved(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters, whole and in float32, each moved by random numbers: a bias of zeros
    would hide that nobody adds it."""
    values, generator = {}, torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        whole = full_tensor(parameter).detach()
        if not whole.is_floating_point():
            values[name] = whole.clone()
            continue
        whole = whole.float()
        finite = whole[whole.isfinite()]
        spread = max(float(finite.std(correction=0)) if len(finite) else 0.0, MOVED)
        values[name] = whole + MOVED * spread * torch.randn(whole.shape, generator=generator)
    return values


def with_random_ids(model: nn.Module, example: Example, anew: bool = False) -> Example:
    """Return the example with random ids in place of equal ones that an embedding of the model gets, because
    they hide what attention computes. `anew`: in place of any."""
    sizes: dict[int, int] = {}  # by address of the ids

    def note(module: Any, args: Any) -> None:
        sizes.update({ids.data_ptr(): module.num_embeddings for ids in args if isinstance(ids, Tensor)})

    hooks = [
        module.register_forward_pre_hook(note)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    ]
    with torch.no_grad():
        call(model, example)
    for hook in hooks:
        hook.remove()

    def replace(ids: Tensor) -> Tensor:
        size = sizes.get(ids.data_ptr(), 0)
        if not size or not (anew or bool((ids == ids.flatten()[0]).all())):
            return ids
        return torch.randint(size, ids.shape, generator=torch.Generator().manual_seed(0), dtype=ids.dtype)

    replaced: Example = tree_map_only(Tensor, replace, example)
    return replaced


def whole_outputs(result: Any) -> list[Tensor]:
    """Return the tensors of numbers in a model's result, DTensors whole."""
    leaves = [full_tensor(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    leaves = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return [leaf for leaf in leaves if leaf.is_floating_point()]
