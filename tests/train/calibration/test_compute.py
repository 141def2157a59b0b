"""Calibration of one device: counted operations, and what is made of measured seconds."""

from collections.abc import Sequence

import pytest
import torch

from meshwright.train.calibration.compute import (
    FEW,
    MANY,
    AttentionShape,
    Run,
    Timer,
    attention_work,
    combine,
    computing_rate,
    graph_seconds,
    measure_product,
)


class FixedClock(Timer):
    """Runs the work once and reports given seconds, in turn."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(torch.device("cpu"), budget_s=0.0, rotated_bytes=2**12)
        self.given = iter(seconds)

    def host_seconds(self, runs: Sequence[Run]) -> float:
        for run in runs:
            run()
        return next(self.given)

    core_seconds = host_seconds


def test_operations_are_counted_as_the_planner_does() -> None:
    forward, backward = attention_work(AttentionShape(batch=2, heads=4, kv_heads=2, head_dim=8, seq=16))
    assert forward == 2 * (2 * 4 * 16 * 16 * 8)  # two products of 2 operations each, half of the square
    assert backward == 2.5 * forward  # five products: one of the forward's is recomputed
    product = measure_product(FixedClock(1e-6), (8, 16, 4), "float32")
    assert (product.flops, product.moved) == (3 * 2 * 8 * 16 * 4, 3 * 4 * (8 * 16 + 16 * 4 + 8 * 4))
    # what is left of 1 us beside the traffic, here 0.2688 us; of a cached one, half
    assert computing_rate([product], 1e10) == pytest.approx(product.flops / 0.7312e-6)
    assert computing_rate([product], 1e9) == pytest.approx(product.flops / 0.5e-6)


def test_a_graph_and_a_kernel_are_told_apart_by_the_length_of_two_chains() -> None:
    """A chain of n products is two graphs, forward and backward, and 3 n kernels."""
    graph_s, kernel_s = 40e-6, 5e-6
    chains = [2 * graph_s + 3 * products * kernel_s for products in (FEW, MANY)]
    with torch.compiler.set_stance("force_eager"):
        assert graph_seconds(FixedClock(*chains)) == pytest.approx((graph_s, kernel_s))
        assert graph_seconds(FixedClock(40e-6, 30e-6)) == pytest.approx((20e-6, 0.0)), "never below zero"


def test_equal_measurements_are_combined_part_by_part() -> None:
    first = {"matmul": {"float32": 5.0, "bfloat16": 9.0}, "graph_s": 3.0, "copy_bytes_s": 7.0}
    second = {"matmul": {"float32": 6.0, "bfloat16": 8.0}, "graph_s": 2.0, "copy_bytes_s": 8.0}
    best = combine([first, second], lambda key, values: min(values) if key == "graph_s" else max(values))
    assert best == {"matmul": {"float32": 6.0, "bfloat16": 9.0}, "graph_s": 2.0, "copy_bytes_s": 8.0}
