"""Calibration of one device: counted operations, and rates and costs of real tiny work."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from meshwright.train.calibration.compute import (
    CPU_SCALE,
    GPU_SCALE,
    attention_work,
    better,
    fused_rate,
    measure_attention,
    measure_product,
    optimizer_rate,
    quicker,
)
from meshwright.train.calibration.host import FEW, MANY, graph_seconds, tiny_operations
from meshwright.train.calibration.timing import AttentionShape, Run, Timer


def test_attention_is_counted_as_the_planner_does() -> None:
    forward, backward = attention_work(AttentionShape(batch=2, heads=4, kv_heads=2, head_dim=8, seq=16))
    assert forward == 2 * (2 * 4 * 16 * 16 * 8)  # two products of 2 operations each, half of the square
    assert backward == 2.5 * forward  # five products: one of the forward's is recomputed


def test_rates_of_tiny_work_are_measured() -> None:
    clock = Timer(torch.device("cpu"), budget_s=0.01)
    gflop, rate = measure_product(clock, (8, 16, 4), "float32", 2**12)
    assert gflop == pytest.approx(2 * 8 * 16 * 4 / 1e9)
    assert rate > 0
    assert all(
        rate > 0 for rate in measure_attention(clock, AttentionShape(1, 2, 1, 8, 64), "bfloat16", 2**12)
    )
    scale = dataclasses.replace(CPU_SCALE, memory=(8, 16, 32), unit_values=64, rotated_bytes=2**12)
    assert fused_rate(clock, scale, "bfloat16") > 0
    assert optimizer_rate(clock, scale) > 0


class FixedClock(Timer):
    """Runs the work once and reports given seconds, in turn."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(torch.device("cpu"), budget_s=0.0)
        self.given = iter(seconds)

    def host_seconds(self, runs: Sequence[Run]) -> float:
        for run in runs:
            run()
        return next(self.given)


def test_a_graph_and_a_kernel_are_told_apart_by_the_length_of_two_chains() -> None:
    """A chain of n products is two graphs, forward and backward, and 3 n kernels."""
    graph_s, kernel_s = 40e-6, 5e-6
    chains = [2 * graph_s + 3 * products * kernel_s for products in (FEW, MANY)]
    assert graph_seconds(FixedClock(*chains)) == pytest.approx((graph_s, kernel_s))
    assert graph_seconds(FixedClock(40e-6, 30e-6)) == pytest.approx((20e-6, 0.0)), "noise: never below zero"


def test_the_host_needs_time_for_tiny_operations() -> None:
    clock = Timer(torch.device("cpu"), budget_s=0.01)
    assert clock.host_seconds([tiny_operations(clock.device)]) > 0


@pytest.mark.parametrize("scale", [CPU_SCALE, GPU_SCALE])
def test_quick_is_a_part_of_the_whole(scale) -> None:
    quick = quicker(scale)
    assert set(quick.products) < set(scale.products)
    assert set(quick.attention) < set(scale.attention)


def test_the_better_of_two_rounds_counts() -> None:
    first = {"matmul": {"float32": [(1.0, 5.0), (2.0, 9.0)]}, "graph_s": 3.0, "copy_bytes_s": 7.0}
    second = {"matmul": {"float32": [(1.0, 6.0), (2.0, 8.0)]}, "graph_s": 2.0, "copy_bytes_s": 8.0}
    assert better(first, second) == {
        "matmul": {"float32": [(1.0, 6.0), (2.0, 9.0)]},
        "graph_s": 2.0,
        "copy_bytes_s": 8.0,
    }
