"""Products in float8, by torchao: which linears, with which scales, and weights sent in float8.

Source of the recipes: torchao.float8 (tensorwise: one scale for each tensor; rowwise: one for each row of
what is multiplied). Activations, weights and gradients are scaled by their own largest value, each time they
are multiplied. Parameters keep their names and dtypes; those that FSDP2 is to send in float8 are wrapped in a
tensor of torchao's that knows how, which `fsdp.local_part` looks through.
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
from meshwright.parallel.plan.schema import Float8Plan, Plan

LEAST_CAPABILITY = (8, 9)  # of a GPU that multiplies float8 (torch._scaled_mm): Ada, Hopper and newer


def check_float8(plan: Float8Plan, device: torch.device) -> None:
    """Raise PlanError unless this machine can multiply as the plan says. A CPU emulates it."""
    _import_torchao()
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise PlanError(
            f"parallel.float8.recipe={plan.recipe} needs a GPU of compute capability "
            f"{_version(LEAST_CAPABILITY)} or more, and {torch.cuda.get_device_name(device)} has "
            f"{_version(found)}: use none"
        )


def apply_float8(model: nn.Module, plan: Plan, device_type: str) -> None:
    """Give the plan's linears products in float8, in place, before anything else is done to the model. Raises
    PlanError where torchao is not installed, and if a pattern meets no linear."""
    found = dict.fromkeys(plan.float8.linears, 0)

    def chosen(module: nn.Module, name: str) -> bool:
        pattern = next((p for p in found if fnmatch.fnmatchcase(name, p)), None)
        if pattern is not None:
            found[pattern] += 1
        return pattern is not None

    convert, recipes = _import_torchao()
    # Padded where the tokens of a micro batch, which the gradient of a weight sums over, are no multiple of
    # 16.
    config = replace(
        recipes(plan.float8.recipe),
        emulate=device_type == "cpu",
        pad_inner_dim=True,
        enable_fsdp_float8_all_gather=plan.float8.all_gather,
    )
    convert(model, config=config, module_filter_fn=chosen)
    if missed := [pattern for pattern, times in found.items() if not times]:
        raise PlanError(f"float8: linears: {missed[0]} meets no linear of this model")
    for module in model.modules():
        if hasattr(module, "linear_mm_config"):
            module.product = MethodType(_product, module)  # type: ignore[assignment]
    if scales_ahead(plan):
        _scale_after_each_step(model)


def scales_ahead(plan: Plan) -> bool:
    """Whether weights are scaled for their next all-gather as soon as the optimizer has changed them."""
    # FSDP2 copies an offloaded weight to the device without its scale
    return plan.float8.all_gather and not plan.cpu_offload


def _scale_after_each_step(model: nn.Module) -> None:
    """By whichever optimizer, so that no loop has to know of it: a hook of all optimizers, which looks whose
    weights have changed."""
    of_model = weakref.ref(model)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = of_model()
        if model is not None and _changes(optimizer, model):
            scale_weights(model)

    # Never removed: torch goes through its hooks while one could be.
    register_optimizer_step_post_hook(after_step)


def _changes(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    weights = set(map(id, model.parameters()))
    return any(id(parameter) in weights for group in optimizer.param_groups for parameter in group["params"])


def scale_weights(model: nn.Module) -> None:
    """The scales of all weights that are sent in float8, by one all-reduce, where each all-gather would need
    one for each."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def _product(module: Any, x: Tensor, weight: Tensor) -> Tensor:
    """x[..., K] · weight[N, K] -> [..., N]: what torchao's linear does with its own weight, for a rank's part
    of one."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args.apply(x, weight.t(), module.linear_mm_config, module.config)


def _import_torchao() -> tuple[Any, Any]:
    """Its function that converts a model, and its recipes by name. It says on import what else it could do on
    a GPU."""
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
