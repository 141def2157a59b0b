"""The counts of `tools.dryrun` from a small recorded step, and the bytes of operators.

recorded/ has 17 calls of a step of llama_debug on two GPUs, as the fake GPU and torch's profiler wrote them.
"""

from pathlib import Path
from typing import Any

import pytest

from meshwright.tools.dryrun.log import Call, collectives
from meshwright.tools.dryrun.report import read_dry_run

RECORDED = Path(__file__).with_name("recorded")
TOKENS, DIM, KV_DIM, VOCABULARY = 4 * 256, 192, 96, 264  # of a micro batch of llama_debug
BFLOAT16, FLOAT32 = 2, 4
HIDDEN = TOKENS * DIM * BFLOAT16  # x[B, T, D]


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    return read_dry_run(RECORDED)


def test_launches_waits_and_collectives_are_counted_by_library_and_axis(run: dict[str, Any]) -> None:
    assert run["launches_by_library"] == {"torch": 7, "cublas": 2, "cudnn": 1, "triton": 2}
    assert run["host_waits"] == run["device_allocations"] == 0
    assert run["host_waits_at"] == {"model.py:7": 2}
    assert run["copies"] == [{"kind": "HtoD", "count": 1, "bytes": 240}]
    gathered, reduced = VOCABULARY * DIM * BFLOAT16, (VOCABULARY + 1) * DIM * FLOAT32  # the head has a norm
    assert [tuple(c.values()) for c in run["collectives"]] == [
        ("all_reduce", "world", 4, 0),
        ("all_gather", "dp_shard", gathered, 1),
        ("reduce_scatter", "dp_shard", reduced, 2),
        ("all_reduce", "world", 4, 0),
    ]


def test_an_all_to_all_is_one_group_of_sends_and_receives() -> None:
    """Two in a row, in which not every rank sends or gets something; then another collective."""

    def call(op: str, size: int, group: int) -> Call:
        return Call("nccl", 7, (op, "0", "4", str(size), str(group)))

    calls = [call("send", 8, 1), call("recv", 6, 1), call("recv", 4, 1), call("send", 3, 2)]
    calls += [Call("kernel", 0, ()), call("recv", 1, 2), call("all_reduce", 4, 2)]
    found = collectives(calls)
    assert [*found] == [id(calls[0]), id(calls[3]), id(calls[6])]
    assert [(c.op, c.bytes) for c in found.values()] == [
        ("all_to_all", 10),
        ("all_to_all", 3),
        ("all_reduce", 4),
    ]


def test_each_kernel_has_the_bytes_of_its_tensors_or_none(run: dict[str, Any]) -> None:
    expected = {
        "product 1024 x 192 x 192, bfloat16": 2 * (2 * HIDDEN + DIM * DIM * BFLOAT16),
        # reads the table, which is smaller than the result, and one index per token; the index is expanded
        "vectorized_gather_kernel": VOCABULARY * DIM * BFLOAT16 + TOKENS * 8 + HIDDEN,
        "chunk_cat_cuda_kernel": (VOCABULARY + 1) * DIM * (BFLOAT16 + FLOAT32),
        "split_with_sizes_copy_out_contiguous_no_cast_kernel": 2 * VOCABULARY * DIM * BFLOAT16,
    }
    counted = {kernel["name"]: kernel for kernel in run["kernels"]}
    assert {name: counted[name]["bytes"] for name in expected} == expected
    grouped, log_sums = TOKENS * KV_DIM * BFLOAT16, TOKENS * 8 * FLOAT32  # of 8 heads
    attention = counted["_cudnn_attention_forward"]["bytes"]
    assert attention == pytest.approx(2 * HIDDEN + 2 * grouped + log_sums, rel=1e-3)  # and two seeds
    fused = counted["triton_per_fused__fused_rms_norm_0"]
    norm = 2 * HIDDEN + 2 * TOKENS * FLOAT32 + DIM * BFLOAT16  # inductor counts the root of each row twice
    assert [fused[key] for key in ("bytes", "calls", "registers", "spills")] == [2 * norm, 2, 60, 0]
    unknown = {kernel["name"] for kernel in run["kernels"] if kernel["bytes"] is None}
    assert unknown == {"embedding_backward_feature_kernel", "lpnorm_cleanup"}
    assert sum(kernel["share"] or 0 for kernel in run["kernels"]) == pytest.approx(1)
