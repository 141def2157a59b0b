"""The complete interface between a model and `parallel/`, apart from the data of a `ModelUnits`: methods that
`parallel/` calls, and attributes that it sets on the model and its modules."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ShardableModel(Protocol):
    """A model that describes itself and has selectable kernels; `describe` reads all others from their
    modules.

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


# Attribute set on a model or its modules -> the file that sets it, and its use.
ATTRIBUTES = {
    "unsharded": "tensor_parallel.py, on norms of other formulas: a copy that computes with given weights",
    "tensor_axis": "tensor_parallel.py, on split modules: the axis that their forwards use",
    "around": "model/attention_cores.py, on attention of transformers: the exchange that it computes within",
    "matrix": "tensor_parallel.py, on modules with this method: returns this rank's shard of the weight",
    "product": "float8.py, on linear layers: the float8 product, called by tensor_parallel.py",
    "saved_ops": "activation_checkpoint.py, on recomputed modules: operators whose results are saved",
    "activation_offload": "activation_offload.py, on the model: forward_only.py disables it",
    "_compiled_call_impl": "activation_offload.py and compile/apply.py, torch's own attribute: the function "
    "that replaces a call",
}
