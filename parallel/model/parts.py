"""Parts of an example: some of its rows, the outputs of a model for them, and what its loss is over rows."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.parallel.errors import PlanError
from meshwright.parallel.model.attention_cores import position_argument
from meshwright.parallel.model.forward import Example, call_arguments
from meshwright.parallel.model.inputs import tokens_of
from meshwright.parallel.sharded_model import evaluating

Loss = Callable[[Any, Example], Tensor]  # outputs, example -> a scalar
LOSSES = {
    "": "",
    "sum": '\nthe loss is a sum over rows: gradients="sum", divided by what micro_batches counts',
    "mean": '\nthe loss is a mean over rows: gradients="mean_of_ranks", if all ranks have equally many',
    "neither": "\nthe loss is neither a sum nor a mean over rows: use a sum, and gradients='sum'",
}


def own_part(example: Example, rank: int, parts: int) -> Example:
    """Return a rank's rows of the example's tensors; an example of fewer rows than ranks is used by all."""
    rows = rows_of(example)
    if rows < parts:
        return example
    return some_rows(example, rows * rank // parts, rows * (rank + 1) // parts)


def rows_of(example: Example) -> int:
    """Return the first of the first dimensions that is not 1, as that of positions [1, T] is."""
    sizes = [len(leaf) for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    return next((size for size in sizes if size != 1), min(len(sizes), 1))


def some_rows(example: Example, start: int, stop: int) -> Example:
    rows = rows_of(example)

    def cut(tensor: Tensor) -> Tensor:
        return tensor[start:stop] if tensor.dim() and tensor.shape[0] == rows else tensor

    part: Example = tree_map_only(Tensor, cut, example)
    return part


def repeated_rows(example: Example, rows: int) -> Example:
    """Return an example with at least so many rows: its own, again and again."""
    have = rows_of(example)
    index = torch.arange(max(rows, have)) % max(have, 1)

    def repeat(tensor: Tensor) -> Tensor:
        return tensor[index] if tensor.dim() and tensor.shape[0] == have else tensor

    found: Example = tree_map_only(Tensor, repeat, example)
    return found


def call(model: nn.Module, part: Example, own: Tensor | None = None) -> Any:
    """Run the forward, on the tokens `own` only if it is given."""
    positions, shape = {}, (tokens_of(part),)
    if own is not None:
        positions = {position_argument(model): own.expand(rows_of(part), -1)}
        part = tree_map_only(Tensor, lambda t: t[:, own] if t.shape[1:2] == shape else t, part)
    args, kwargs = call_arguments(part)
    return model(*args, **positions | kwargs)


def check_signature(loss: Loss, example: Example) -> None:
    """Raise PlanError if a loss does not take outputs and example."""
    try:
        inspect.signature(loss).bind(None, example)
    except ValueError:
        return  # a builtin tells none
    except TypeError as error:
        raise PlanError(f"the loss must be a function of outputs and example: {error}") from error


def outputs_of_parts(model: nn.Module, example: Example) -> list[tuple[Any, Example]]:
    """Return outputs without dropout, and what they are of: all rows of the example, the first, and the
    others; nothing of a single row."""
    rows = rows_of(example)
    ends = ((0, rows), (0, 1), (1, rows)) if rows > 1 else ()
    with evaluating(model), torch.no_grad():
        return [(call(model, part), part) for part in (some_rows(example, *each) for each in ends)]


def kind_of_loss(parts: Sequence[tuple[Any, Example]], loss: Loss) -> str:
    """Return whether a loss is the "sum" or "mean" over rows, or "neither", from the outputs of unequal
    parts; "" if there are none, or if it could be both, as zeros. Raises PlanError if the loss fails."""
    if not parts:
        return ""
    try:
        whole, first, rest = (float(loss(outputs, part)) for outputs, part in parts)
    except Exception as error:
        raise PlanError(f"the loss fails on the model's outputs: {error!r}: correct it") from error
    others = rows_of(parts[2][1])
    kinds = {"sum": first + rest, "mean": (first + others * rest) / (1 + others)}
    fits = [kind for kind, value in kinds.items() if math.isclose(value, whole, rel_tol=1e-4)]
    return "neither" if not fits else fits[0] if len(fits) == 1 else ""
