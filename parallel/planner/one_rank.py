"""A model as one tensor-parallel rank holds it, without the others."""

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from meshwright.parallel.plan import TensorPlan
from meshwright.parallel.tensor import TensorAxis, apply_styles


def apply_as_one_rank(model: nn.Module, tensor: TensorPlan, degree: int) -> None:
    """What `apply_tensor_parallel` does, for rank 0 alone and without a process group, for whoever only looks
    at what a rank would do: weights are plain tensors of a rank's shapes."""
    axis = TensorAxis("tp", degree, 0, tensor.sequence_parallel)

    def share(whole: Tensor, placement: Placement) -> Tensor:
        return whole.chunk(axis.degree, placement.dim)[0].clone() if isinstance(placement, Shard) else whole

    apply_styles(model, tensor, axis, share)
