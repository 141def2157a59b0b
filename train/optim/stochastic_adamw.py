"""AdamW for parameters or moments in bfloat16, which torch's fused AdamW rounds to nearest, or has not."""

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
    """AdamW with decoupled weight decay, whose bfloat16 values are rounded stochastically
    (train/optim/adamw_kernel.py).

    Its state must be there: `step`, `exp_avg` and `exp_avg_sq`, as of torch's AdamW, moments in either dtype.
    Like that one it obeys two scalars on the device: gradients are divided by `grad_scale`, and with
    `found_inf` at 1 no bit changes. Nothing in a step waits for the device.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], keys: Mapping[Tensor, int]) -> None:
        """`groups`: with params, lr, betas, eps and weight_decay. `keys`: of each parameter, decides its
        random bits."""
        super().__init__(groups, {})
        self._keys = keys
        self._places: dict[Tensor, tuple[int, int, int]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            # Fake tensors, of a simulation, have nothing to update; and a GPU's kernel would hold nothing
            # beside them.
            if not trained or isinstance(local_part(trained[0]), FakeTensor):
                continue
            device = local_part(trained[0]).device
            skip = torch.zeros((), device=device) if self.found_inf is None else self.found_inf.to(device)
            # Also of parameters of which this rank has no row: every rank counts alike, and any of them may
            # save the count.
            torch._foreach_add_([self.state[p]["step"] for p in trained], [1 - skip] * len(trained))
            if held := [p for p in trained if local_part(p).numel()]:
                self._kernel(device)([self._slice(p) for p in held], self._make_step(group, held, skip))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's, but that the state keeps its dtypes, where torch gives it the parameter's."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            p = parameters[number]
            self.state[p] = {name: value.to(local_part(p).device, copy=True) for name, value in state.items()}

    def _make_step(self, group: dict[str, Any], parameters: list[Tensor], skip: Tensor) -> AdamWStep:
        """The step's scalars: computed on the device, where only the step count is known."""
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
        if parameter not in self._places:
            self._places[parameter] = _place(parameter)
        parts = [
            local_part(tensor).view(-1)
            for tensor in (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        ]
        return Slice(parts[0], parts[1], parts[2], parts[3], self._keys[parameter], *self._places[parameter])

    @staticmethod
    def _kernel(device: torch.device) -> Any:
        """The one for this kind of device."""
        if device.type != "cuda":
            return adamw_kernel.update
        from meshwright.train.optim import adamw_triton

        return adamw_triton.update


def _place(parameter: Tensor) -> tuple[int, int, int]:
    """`first`, `columns` and `gap` of a `Slice`: where this rank's part lies in a whole parameter of one or
    two dims."""
    shape, offsets = tuple(parameter.shape), (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        local, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        shape = tuple(local)
        assert local_part(parameter).shape == torch.Size(shape), (parameter.shape, shape)
    whole, columns = parameter.shape[-1], shape[-1]
    assert 1 <= parameter.dim() <= 2, parameter.shape
    first = offsets[-1] + (offsets[0] * whole if parameter.dim() == 2 else 0)
    return first, columns, whole - columns if parameter.dim() == 2 else 0
