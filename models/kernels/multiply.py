"""Multiplication of a tensor by a scalar on its device, without a pass over the tensor if the scalar is 1."""

import torch
from torch import Tensor


@torch.library.custom_op("meshwright::multiply_unless_one_kernel", mutates_args=("x",))
def multiply_unless_one(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous x by a float32 scalar. A GPU reads the scalar itself: the host does not wait."""
    if x.is_cuda:
        from meshwright.models.kernels.multiply_triton import multiply_unless_one as on_gpu

        on_gpu(x, factor)
    elif factor != 1:
        x.copy_(x.float() * factor)


@multiply_unless_one.register_fake
def _(x: Tensor, factor: Tensor) -> None:
    return None
