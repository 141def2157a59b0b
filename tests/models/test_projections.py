"""Fused projections: the same results and gradients as separate ones, fewer matrix products, and no
additional saved activations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.models.config import LlamaConfig
from meshwright.models.llama import Llama
from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.trace import capture_joint, compiled_workload, eager_workload
from tests.support.launch import EAGER, TINY
from tests.support.sharded import sharded_alone
from tests.train.test_step import Count

CONFIG = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=192, vocab_size=97, max_seq_len=32)
FUSED = "--parallel.fused_projections=true"
BLOCK_PRODUCTS = {False: 7 + 14, True: 4 + 8}  # forward and backward


def make_model(fused: bool, attention: str = "cpu") -> Llama:
    model = Llama(CONFIG)
    model.initialise(0)
    model.choose_kernels(attention, 0, fused)
    return model


def loss_and_gradients(
    fused: bool, dtype: torch.dtype, frozen: tuple[str, ...] = ()
) -> tuple[Tensor, dict[str, Tensor | None]]:
    model = make_model(fused).to(dtype)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    tokens_BT, targets_BT = (torch.randint(97, (3, 32), generator=generator) for _ in range(2))
    loss = model(tokens_BT, targets_BT)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "tolerance", "frozen"),
    [
        (torch.float32, 1e-5, ()),
        (torch.float32, 1e-5, ("layers.0.attention.wk.weight",)),
        (torch.float32, 1e-5, tuple(f"layers.0.feed_forward.w{n}.weight" for n in (1, 3))),
        (torch.bfloat16, 0.03, ()),
    ],
)
def test_loss_and_gradients_are_those_of_separate_products(
    dtype: torch.dtype, tolerance: float, frozen: tuple[str, ...]
) -> None:
    (loss, grads), (other_loss, others) = (
        loss_and_gradients(fused, dtype, frozen) for fused in (True, False)
    )
    torch.testing.assert_close(loss, other_loss, rtol=tolerance, atol=0)
    for name, grad in grads.items():
        other = others[name]
        assert (grad is None) == (other is None) == (name in frozen)
        if grad is not None and other is not None:
            assert (grad - other).norm() < tolerance * other.norm(), name


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_makes_as_many_products_as_its_plan_says(fused: bool) -> None:
    """With FSDP, eager: 12 products per block instead of 21, and 3 in the head."""
    tokens_BT = torch.zeros(2, 32, dtype=torch.int64)
    products = Count("aten.mm.", "aten.addmm.", "aten.bmm.")
    with sharded_alone([*TINY, *EAGER, *([FUSED] if fused else [])]) as alone, products:
        alone.model(tokens_BT, tokens_BT).backward()
        assert products.count == alone.config.model.n_layers * BLOCK_PRODUCTS[fused] + 3
        assert alone.plan.fused_projections == fused
        names = {name for name, _ in alone.model.named_parameters()}
        assert names == {name for name, _ in Llama(alone.config.model).named_parameters()}


def build_block(fused: bool) -> Callable[[int], TracedModule]:
    def build(sequences: int) -> TracedModule:
        x = torch.ones(sequences, 32, CONFIG.dim, requires_grad=True).clone()
        tables = tuple(torch.ones(32, CONFIG.head_dim // 2) for _ in range(2))
        return TracedModule(make_model(fused).layers[0], (x, *tables), tables=tables)

    return build


@pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.sampled(6)])],
    ids=["eager", "compiled"],
)
def test_fewer_products_keep_nothing_more_for_the_backward(compiled: bool) -> None:
    """Neither the compiler nor autograd saves the concatenated weights, or queries and keys along with the
    values."""
    builds = build_block(False), build_block(True)
    works = [compiled_workload(capture_joint(each)) if compiled else eager_workload(each) for each in builds]
    assert works[0].saved_bytes == works[1].saved_bytes
    products = [
        [
            sum(operation.kind == "matmul" for operation in phase.operations)
            for phase in (w.forward, w.backward)
        ]
        for w in works
    ]
    assert products == [[7, 14], [4, 8]]
