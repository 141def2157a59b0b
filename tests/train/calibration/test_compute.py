"""Calibration of one device: counted operations, and what is made of measured seconds."""

from collections.abc import Sequence

import pytest
import torch

from meshwright.parallel.operators import attention_flops
from meshwright.train.calibration.compute import (
    AttentionShape,
    Run,
    Timer,
    combine,
    computing_rate,
    measure_attention,
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
    shape = AttentionShape(batch=2, heads=4, kv_heads=2, head_dim=8, seq=16)
    forward, backward = measure_attention(FixedClock(1e-6, 3e-6), shape, "float32")
    q, k = (torch.empty(2, heads, 16, 8) for heads in (4, 2))
    assert forward.flops == attention_flops("attention", (q, k))
    assert backward.flops == attention_flops("attention_backward", (q, q, k))
    assert (forward.moved, backward.moved) == (8 * (q.numel() + k.numel()), 16 * (q.numel() + k.numel()))
    assert (forward.seconds, backward.seconds) == pytest.approx((1e-6, 2e-6))
    product = measure_product(FixedClock(1e-6), (8, 16, 4), "float32")
    assert (product.flops, product.moved) == (3 * 2 * 8 * 16 * 4, 3 * 4 * (8 * 16 + 16 * 4 + 8 * 4))
    # what is left of 1 us beside the traffic, here 0.2688 us; of a cached one, half
    assert computing_rate([product], 1e10) == pytest.approx(product.flops / 0.7312e-6)
    assert computing_rate([product], 1e9) == pytest.approx(product.flops / 0.5e-6)


def test_equal_measurements_are_combined_part_by_part() -> None:
    first = {"attention": {"float32": [5.0, 9.0]}, "operator_s": 3.0, "copy_bytes_s": 7.0}
    second = {"attention": {"float32": [6.0, 8.0]}, "operator_s": 2.0, "copy_bytes_s": 8.0}
    best = combine([first, second], lambda key, values: min(values) if key == "operator_s" else max(values))
    assert best == {"attention": {"float32": [6.0, 9.0]}, "operator_s": 2.0, "copy_bytes_s": 8.0}
