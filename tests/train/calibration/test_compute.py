"""Calibration of one device: counted operations, and rates and costs of real tiny work."""

import dataclasses

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
from meshwright.train.calibration.host import TINY_OPERATIONS, graph_seconds, tiny_operations
from meshwright.train.calibration.timing import AttentionShape, Timer


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


def test_the_host_needs_longer_for_a_graph_than_for_an_operator() -> None:
    clock = Timer(torch.device("cpu"), budget_s=0.05)
    graph_s, kernel_s = graph_seconds(clock)
    operators_s = clock.host_seconds([tiny_operations(clock.device)])
    assert 0 < operators_s / TINY_OPERATIONS < graph_s
    assert 0 < kernel_s < graph_s


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
