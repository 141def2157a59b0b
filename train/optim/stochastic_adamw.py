"""AdamW for bfloat16 parameters or moments: torch's fused AdamW rounds to nearest, with one dtype for all."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.parallel.fsdp import local_part
from meshwright.train.optim import adamw_kernel
from meshwright.train.optim.adamw_kernel import AdamWStep, Slice


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay and stochastic rounding of bfloat16 values
    (train/optim/adamw_kernel.py).

    The caller must create its state: `step`, `exp_avg` and `exp_avg_sq`, as in torch's AdamW, with moments in
    float32 or bfloat16. Two scalars on the device work as in torch's fused AdamW: gradients are divided by
    `grad_scale`, and with `found_inf` at 1 nothing changes. A step never waits for the device.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], keys: Mapping[Tensor, int]) -> None:
        """`groups` with params, lr, betas, eps and weight_decay. `keys`: of the random bits, by parameter."""
        super().__init__(groups, {})
        self._keys = keys
        self._layouts: dict[Tensor, tuple[int, int, int]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            # The fake tensors of a simulation have no values to update, and the GPU kernel allocates no
            # temporaries that the simulation would have to count.
            if not trained or isinstance(local_part(trained[0]), FakeTensor):
                continue
            device = local_part(trained[0]).device
            skip = torch.zeros((), device=device) if self.found_inf is None else self.found_inf.to(device)
            # also for parameters without a local row: the counts must be equal on all ranks, because any rank
            # may save them
            torch._foreach_add_([self.state[p]["step"] for p in trained], [1 - skip] * len(trained))
            if local := [p for p in trained if local_part(p).numel()]:
                self._kernel(device)([self._slice(p) for p in local], self._make_step(group, local, skip))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as any optimizer does, but keep the dtypes of the state; torch would convert it to the
        dtype of the parameter."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            p = parameters[number]
            self.state[p] = {name: value.to(local_part(p).device, copy=True) for name, value in state.items()}

    def _make_step(self, group: dict[str, Any], parameters: list[Tensor], skip: Tensor) -> AdamWStep:
        """The scalars of the step, computed on the device, because the step count is only there."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        divisor = torch.ones_like(skip) if self.grad_scale is None else self.grad_scale.to(skip.device)
        counts = torch.stack([self.state[p]["step"] for p in parameters])
        rates, roots = lr / (1 - beta1 ** counts.double()), (1 - beta2 ** counts.double()).sqrt()
        decay = 1 - lr * group["weight_decay"]
        return AdamWStep(
            beta1, beta2, group["eps"], decay, counts, rates.float(), roots.float(), divisor, skip
        )

    def _slice(self, parameter: Tensor) -> Slice:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if parameter not in self._layouts:
            self._layouts[parameter] = _shard_layout(parameter)
        parts = [
            local_part(tensor).view(-1)
            for tensor in (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        ]
        return Slice(parts[0], parts[1], parts[2], parts[3], self._keys[parameter], *self._layouts[parameter])

    @staticmethod
    def _kernel(device: torch.device) -> Any:
        """The update function for this type of device."""
        if device.type != "cuda":
            return adamw_kernel.update
        from meshwright.train.optim import adamw_triton

        return adamw_triton.update


def _shard_layout(parameter: Tensor) -> tuple[int, int, int]:
    """`first`, `columns` and `gap` of a `Slice`: the position of this rank's shard in a full parameter, which
    may be sharded in its first dimension (FSDP) and in another one (tp)."""
    full = tuple(parameter.shape)
    shape, offsets = full, (0,) * len(full)
    if isinstance(parameter, DTensor):
        local, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        shape = tuple(local)
        assert local_part(parameter).shape == torch.Size(shape), (parameter.shape, shape)
    inner = [dim for dim in range(1, len(full)) if shape[dim] != full[dim]]
    assert len(inner) <= 1, (full, shape)
    row = inner[0] if inner else 0  # a row: what lies contiguous, all dimensions from here on
    first = sum(offset * math.prod(full[dim + 1 :]) for dim, offset in enumerate(offsets))
    columns = math.prod(shape[row:])
    return first, columns, math.prod(full[row:]) - columns if inner else 0
