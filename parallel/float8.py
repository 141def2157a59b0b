"""Matrix products in float8, by torchao: selected linear layers, scales, and all-gathers of weights in
float8.

Source of the recipes: torchao.float8 (tensorwise: one scale per tensor; rowwise: one scale per row of each
operand). Activations, weights and gradients are scaled by their own largest value at every product.
Parameters keep their names and dtypes; those that FSDP2 gathers in float8 are wrapped in a torchao tensor,
which `fsdp.local_part` unwraps.
"""

import fnmatch
import logging
import warnings
import weakref
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Float8Plan, Plan, gathers_in_float8

LEAST_CAPABILITY = (8, 9)  # of a GPU with float8 products (torch._scaled_mm): Ada, Hopper and newer


def check_float8(plan: Float8Plan, device: torch.device) -> None:
    """Raise PlanError unless this machine supports the plan's float8 products. A CPU emulates them."""
    _import_torchao()
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise PlanError(
            f"parallel.float8.recipe={plan.recipe} needs a GPU of compute capability "
            f"{_version(LEAST_CAPABILITY)} or more, but {torch.cuda.get_device_name(device)} has "
            f"{_version(capability)}: use parallel.float8.recipe=none"
        )


def apply_float8(model: nn.Module, plan: Plan, device_type: str) -> None:
    """Convert the plan's linear layers to float8 products, in place; call it before all other changes to the
    model. PlanError if torchao is not installed or a pattern matches no linear layer."""
    matches = dict.fromkeys(plan.float8.linears, 0)

    def chosen(module: nn.Module, name: str) -> bool:
        pattern = next((p for p in matches if fnmatch.fnmatchcase(name, p)), None)
        if pattern is not None:
            matches[pattern] += 1
        return pattern is not None

    convert, recipes = _import_torchao()
    # Pads if the number of tokens in a micro batch, the inner dim of a weight's gradient, is not a multiple
    # of 16.
    config = replace(
        recipes(plan.float8.recipe),
        emulate=device_type == "cpu",
        pad_inner_dim=True,
        enable_fsdp_float8_all_gather=gathers_in_float8(plan),
    )
    convert(model, config=config, module_filter_fn=chosen)
    if unmatched := [pattern for pattern, count in matches.items() if not count]:
        raise PlanError(f"float8: linears: {unmatched[0]} matches no linear layer of this model: remove it")
    for module in model.modules():
        if hasattr(module, "linear_mm_config"):
            module.product = MethodType(_product, module)  # type: ignore[assignment]
    if precomputes_scales(plan):
        _scale_after_each_step(model)


def precomputes_scales(plan: Plan) -> bool:
    """Return whether scales of weights are computed after the optimizer step, for the next all-gather."""
    # with CPU offload FSDP2 copies a weight to the device without its scale
    return gathers_in_float8(plan) and not plan.cpu_offload


def _scale_after_each_step(model: nn.Module) -> None:
    """Register a hook on all optimizers that updates the scales after a step on this model's weights, so that
    training loops need no extra call."""
    model_reference = weakref.ref(model)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = model_reference()
        if model is not None and _changes(optimizer, model):
            scale_weights(model)

    # Never removed: torch iterates over its hooks, and removing one meanwhile would fail.
    register_optimizer_step_post_hook(after_step)


def _changes(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    weights = set(map(id, model.parameters()))
    return any(id(parameter) in weights for group in optimizer.param_groups for parameter in group["params"])


def scale_weights(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8 by one all-reduce, instead of one
    all-reduce per weight at each all-gather."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def _product(module: Any, x: Tensor, weight: Tensor) -> Tensor:
    """x[..., K] · weight[N, K] -> [..., N]: torchao's product, with a rank's shard of the weight."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args.apply(x, weight.t(), module.linear_mm_config, module.config)


def _import_torchao() -> tuple[Any, Any]:
    """Return torchao's function that converts a model, and its constructor of a recipe by name. Silences the
    hints that torchao logs on import."""
    for noisy in ("torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise PlanError(
            "parallel.float8 needs torchao, which is not installed: pip install -e '.[float8]'"
        ) from None
    return convert_to_float8_training, Float8LinearConfig.from_recipe_name


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
