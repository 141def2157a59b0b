"""What `parallel/` asks of a model besides being an nn.Module, and what it leaves on the model's modules.
Nothing else passes between a model and its parallelisation but the data of a `ModelUnits`."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class ShardableModel(Protocol):
    """A model with a choice of kernels; one without leaves the method out.

    Its modules may have two methods. `matrix() -> Tensor`, of a linear whose weight others multiply with: the
    weight to use, of which tensor parallelism gives this rank's part. `split_vocabulary(group_name, rank)`,
    of the loss, a module of style "loss": from now on the logits are this rank's share of the vocabulary.
    """

    def choose_kernels(self, attention: str, loss_chunk_tokens: int, fused_projections: bool) -> None:
        """The kernel of attention, of `ModelUnits.attention_kernels`; tokens whose logits are there at a
        time, 0 for all; and whether projections of the same input are one product."""


# Attributes that are set on a model or its modules -> who sets it; who reads it.
MARKS = {
    "tensor_axis": "tensor_parallel.py, on split modules: the axis that their forwards use",
    "matrix": "tensor_parallel.py, on modules that have the method: this rank's part of the weight",
    "product": "float8.py, on linears: how tensor_parallel.py multiplies with this rank's part of the weight",
    "saved_ops": "activation_checkpoint.py, on recomputed modules: what their own forward keeps",
    "activation_offload": "activation_offload.py, on the model: switched off by forward_only.py",
    "_compiled_call_impl": "activation_offload.py, torch's own place for what runs in place of a call",
}
