"""An operator of the model's own in a compiler's graph, opened: what its code does, seen with two micro
batches."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.parallel.planner.eager import WATCHED_SEQUENCES, Watched, join_watched, line, watch_call
from meshwright.parallel.planner.work import Linear, Phase


@dataclass(frozen=True)
class Opened:
    """The phase of an operator's code, whose `live` count its results but not its arguments; bytes of each
    result."""

    phase: Phase
    results: tuple[Linear, ...]


def open_operator(
    node: Node, code: Callable[..., Any], fixed: Collection[Node], micro_batch_size: int
) -> Opened:
    """Run the code on fake tensors as large as a graph's, traced with `micro_batch_size` sequences, would be
    with others; the sizes of `fixed` arguments stay."""
    runs = [_run(node, code, fixed, sequences, micro_batch_size) for sequences in WATCHED_SEQUENCES]
    results = zip(*(sizes for _, sizes in runs), strict=True)
    return Opened(join_watched([watched for watched, _ in runs]), tuple(map(line, results)))


def _run(
    node: Node, code: Callable[..., Any], fixed: Collection[Node], sequences: int, traced: int
) -> tuple[Watched, list[int]]:
    def argument(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        tensor: Tensor = value.meta["val"]
        size = list(tensor.shape)
        if size and value not in fixed:
            size[0] = size[0] * sequences // traced
        return tensor.new_empty(size)

    arguments, options = tree_map(argument, (node.args, node.kwargs))
    with torch.no_grad():
        watched, result = watch_call(lambda: code(*arguments, **options), tree_leaves((arguments, options)))
    return watched, [tensor.untyped_storage().nbytes() for tensor in tree_leaves(result)]
