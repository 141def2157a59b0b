"""The kinds of a model's parameters, which optimizers treat differently: matrices, whose updates Muon
orthogonalises, and all others.

A weight that is no matrix (an embedding, a head, a router) can be orthogonalised without an error, and trains
badly; and so can a weight in which several are stored together, or an expert's among others. So the module
decides, and not the shape.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.parallel.config import Kind
from meshwright.parallel.fsdp import names_by_parameter
from meshwright.parallel.plan.schema import innermost

Region = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in a parameter

# names of linears in which several are stored one after another, and of queries, and keys and values, alone
QKV = ("c_attn", "qkv_proj", "qkv", "Wqkv", "wqkv", "in_proj_weight", "query_key_value")
BY_HEADS = (
    "query_key_value",
)  # query, key and value of a head, then of the next one (GPT-NeoX, BLOOM, Falcon)
QUERIES = ("wq", "q_proj", "query")
KEYS_VALUES = ("wk", "wv", "k_proj", "v_proj", "key", "value")
HALVES = ("gate_up_proj", "gate_up", "input_linear", "Wi", "w13", "w12")
# keys of a model's config
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTH = ("hidden_size",)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
IN_GROUPS = ("codegen",)  # types of models whose queries, values and keys are stored in groups of heads


@dataclass(frozen=True)
class ParameterKind:
    """What a parameter is.

    Args:
        kind: matrix: a weight inside a block, or experts' weights [experts, ...]; embedding; head: a matrix
            outside of blocks; router: of experts; vector: norms, biases; other: convolutions and the rest
        shape: of the whole parameter
        dim: of a matrix, that of its outputs
        parts: sizes along `dim` of the matrices that are stored together; empty: one
    """

    kind: Kind
    shape: tuple[int, ...]
    dim: int = 0
    parts: tuple[int, ...] = ()

    @property
    def matrices(self) -> list[Region]:
        """The matrices in the parameter, as regions of two dims, or of three with one expert."""
        if self.kind != "matrix":
            return []
        parts = self.parts or (self.shape[self.dim],)
        places = [*zip(itertools.accumulate((0, *parts)), parts, strict=False)]
        experts = range(self.shape[0]) if len(self.shape) == 3 else (None,)
        return [self._region(expert, *place) for expert, place in itertools.product(experts, places)]

    def _region(self, expert: int | None, start: int, size: int) -> Region:
        offsets, sizes = [0] * len(self.shape), [*self.shape]
        offsets[self.dim], sizes[self.dim] = start, size
        if expert is not None:
            offsets[0], sizes[0] = expert, 1
        return tuple(offsets), tuple(sizes)


def kinds_of(model: nn.Module, blocks: Collection[str], per_head: bool = False) -> dict[str, ParameterKind]:
    """Return the kind of each parameter, by its first name. `blocks`: as `Plan.blocks`. `per_head`: each head
    of queries, keys and values is a matrix."""
    found = {}
    for parameter, names in names_by_parameter(model).items():
        shape = tuple(parameter.shape)
        kind = _kind(model, names, shape, blocks)
        dim, parts = _stored_together(model, names[0], shape, per_head) if kind == "matrix" else (0, ())
        found[names[0]] = ParameterKind(kind, shape, dim, parts)
    return found


def _kind(model: nn.Module, names: list[str], shape: tuple[int, ...], blocks: Collection[str]) -> Kind:
    owners = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    if sum(size > 1 for size in shape) <= 1:
        return "vector"
    if any(isinstance(owner, nn.Embedding) for owner in owners):
        return "embedding"
    linear = all(map(_is_linear, owners))
    # a linear that is a block itself, as one of several heads is, is in none
    around = (
        name.rpartition(".")[0] if _is_linear(of) else name for name, of in zip(names, owners, strict=True)
    )
    if any(innermost(name.rpartition(".")[0], blocks) is None for name in around):
        return "head" if linear else "other"
    experts = _number_of_experts(model, names[0])
    if len(shape) == 2 and shape[0] == experts:
        return "vector" if ".experts." in names[0] else "router"  # a bias of each expert
    stacked = len(shape) == 3 and shape[0] == experts and not any(isinstance(o, nn.Conv1d) for o in owners)
    return "matrix" if stacked or (len(shape) == 2 and linear) else "other"


def _is_linear(module: nn.Module) -> bool:
    # transformers' Conv1D of GPT-2 is a linear layer of inputs x outputs
    return isinstance(module, nn.Linear | nn.MultiheadAttention) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    # FSDP2 makes a unit's class one of its own, derived from the module's
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def _number_of_experts(model: nn.Module, name: str) -> int:
    """Return the number of experts that a parameter belongs to or routes to: those of a module `experts`
    around it, or beside one around it, or of the config; 0: there are none."""
    path = name.split(".")
    for depth in range(len(path) - 1, 0, -1):
        around = model.get_submodule(".".join(path[: depth - 1]))
        experts = getattr(around, "experts", None)
        if isinstance(experts, nn.ModuleList | nn.ModuleDict):
            return len(experts)
        if isinstance(experts, nn.Module):
            stacked = [p.shape[0] for p in experts.parameters() if p.dim() == 3]
            return stacked[0] if stacked else 0
    return _number(_config_above(model, path, EXPERTS), EXPERTS)


def _config_above(model: nn.Module, path: Sequence[str], keys: tuple[str, ...]) -> Any:
    """Return the nearest config above a parameter that has one of these keys; None: there is none."""
    for depth in range(len(path) - 1, -1, -1):
        module = model.get_submodule(".".join(path[:depth]))
        config = module if isinstance(module, nn.MultiheadAttention) else getattr(module, "config", None)
        if _number(config, keys):
            return config
    return None


def _stored_together(
    model: nn.Module, name: str, shape: tuple[int, ...], per_head: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the dim of a matrix's outputs, and the sizes along it of those that are stored one after another
    (none if it is one)."""
    path = name.split(".")
    module = model.get_submodule(".".join(path[:-1]))
    stored = path[-1] if path[-1] != "weight" else path[-2]
    config = _config_above(model, path, HEADS)
    width = _number(_config_above(model, path, WIDTH), WIDTH)
    transposed = _is_transposed(module, stored, shape, width)
    dim = len(shape) - 1 if transposed else len(shape) - 2
    size, inputs = shape[dim], shape[-2 if transposed else -1]
    if not getattr(module, "is_concatenated", True):
        return dim, ()  # gate and up in turns
    if stored in HALVES and size % 2 == 0:
        return dim, (size // 2,) * 2
    heads = _number(config, HEADS)
    kv_heads = _number(config, KV_HEADS) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1
    shares = {
        **dict.fromkeys(QKV, (heads, kv_heads, kv_heads)),
        **dict.fromkeys(QUERIES, (heads,)),
        **dict.fromkeys(KEYS_VALUES, (kv_heads,)),
    }.get(stored, ())
    if getattr(config, "model_type", "") in IN_GROUPS:
        return dim, ()
    if (number := sum(shares)) and size % number == 0:
        if per_head or stored in BY_HEADS:
            return dim, (size // number,) * number
        return dim, tuple(share * size // number for share in shares) if len(shares) > 1 else ()
    return dim, (inputs,) * 3 if stored in QKV and size == 3 * inputs else ()


def _is_transposed(module: nn.Module, stored: str, shape: tuple[int, ...], width: int) -> bool:
    """Whether a weight is inputs x outputs, as GPT-2's linears and some experts in transformers are: they say
    so, or else the width of the model is on that side (Llama 4)."""
    if len(shape) == 3 and not hasattr(module, "is_transposed"):
        # gate and up get the model's width, and what follows them gives it
        transposed, plain = (-2, -1) if stored in HALVES else (-1, -2)
        return shape[transposed] == width != shape[plain]
    return _is_conv1d(module) or bool(getattr(module, "is_transposed", False))


def _number(config: Any, names: tuple[str, ...]) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
