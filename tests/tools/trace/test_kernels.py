"""Kernels of a trace against the roofline: synthetic traces with known figures."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from meshwright.parallel.planner.hardware import Hardware, find_hardware
from meshwright.tools.trace.kernels import KernelRow, KernelTable
from meshwright.tools.trace.roofline import work_of

H100 = find_hardware("NVIDIA H100 80GB HBM3")
BF16, FP32, MAIN, GLOO, GPU = "c10::BFloat16", "float", 1, 2, 7


def event(cat: str, name: str, thread: int, at: float, us: float, args: dict[str, Any]) -> dict[str, Any]:
    process = 0 if thread == GPU else 9
    times = {"pid": process, "tid": thread, "ts": at, "dur": us}
    return {"ph": "X", "cat": cat, "name": name, **times, "args": args}


def operator(
    name: str,
    number: int,
    dims: list[Any],
    dtype: str = BF16,
    *,
    at: float = 0.0,
    us: float = 1.0,
    thread: int = MAIN,
    concrete: Sequence[str] = (),
    **args: Any,
) -> dict[str, Any]:
    kinds = [dtype if size else "Scalar" for size in dims]
    shapes = {"Input Dims": dims, "Input type": kinds, "Concrete Inputs": list(concrete)}
    return event("cpu_op", name, thread, at, us, {"External id": number, **shapes, **args})


def kernel(name: str, number: int | None, us: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    launched = {} if number is None else {"External id": number}
    return event(cat, name, GPU, 0.0, us, launched | args)


def annotation(name: str, at: float, us: float, thread: int = MAIN) -> dict[str, Any]:
    return event("user_annotation", name, thread, at, us, {})


def rows(
    events: Iterable[dict[str, Any]], steps: int = 1, device: Hardware | None = H100, most: int = 60
) -> dict[str, KernelRow]:
    table = KernelTable()
    for event in events:
        table.add(event)
    return {row.name: row for row in table.rows(steps, device, most)}


# A GPU


def test_a_product_has_its_operations_and_its_roof():
    product = operator("aten::mm", 5, [[4096, 4096], [4096, 14336]])
    # so small that its bytes determine the least time
    small = operator("aten::addmm", 6, [[64], [16, 32], [32, 64]])
    found = rows([kernel("nvjet_a", 5, 1000.0), product, small, kernel("nvjet_small", 6, 4.0)], steps=2)
    row = found["nvjet_a"]
    assert row.calls_per_step == 0.5
    assert row.seconds_per_step == pytest.approx(500e-6)
    assert row.tflops == pytest.approx(2 * 4096 * 4096 * 14336 / 1e-3 / 1e12)  # 481
    assert row.gb_s == pytest.approx(2 * (4096 * 4096 + 4096 * 14336 + 4096 * 14336) / 1e-3 / 1e9)
    assert row.roof_share == pytest.approx(481.04 / 989.4, rel=1e-4)
    moved = 2 * (64 + 16 * 32 + 32 * 64 + 16 * 64)
    assert found["nvjet_small"].tflops == pytest.approx(2 * 16 * 32 * 64 / 4e-6 / 1e12)
    assert found["nvjet_small"].roof_share == pytest.approx(moved / 3350e9 / 4e-6)


def test_the_longest_kernel_of_an_operator_did_its_work():
    product = operator("aten::mm", 5, [[64, 4096], [4096, 64]])
    found = rows([product, kernel("splitKreduce", 5, 2.0), kernel("nvjet_a", 5, 10.0)])
    assert found["nvjet_a"].tflops == pytest.approx(2 * 64 * 64 * 4096 / 10e-6 / 1e12)
    rest = found["splitKreduce"]
    assert rest.tflops is rest.gb_s is rest.roof_share is None


Q, KV = [2, 32, 512, 128], [2, 8, 512, 128]  # [B, N, T, H]
FLASH_Q, FLASH_KV = [2, 512, 32, 128], [2, 512, 8, 128]  # [B, T, N, H]
FULL = 2 * 2 * 2 * 32 * 512 * 512 * 128  # operations of a forward that is not causal


@pytest.mark.parametrize(
    ("name", "dims", "concrete", "flops"),
    [
        ("_scaled_dot_product_cudnn_attention", [Q, KV, KV], [""] * 4 + ["True", "0.", "True"], FULL / 2),
        ("_scaled_dot_product_cudnn_attention", [Q, KV, KV], [""] * 4 + ["True", "0.", "False"], FULL),
        (
            "_flash_attention_forward",
            [FLASH_Q, [2, 256, 8, 128], [2, 256, 8, 128]],
            [""] * 5 + ["512", "256", "0.", "True", "False"],
            FULL / 2 / 2,
        ),
        (
            "_flash_attention_backward",
            [FLASH_Q, FLASH_Q, FLASH_KV],
            [""] * 8 + ["512", "512", "0.", "True", "", ""],
            2.5 * FULL / 2,
        ),
        ("_cudnn_attention_backward", [Q, Q, KV], [""] * 11 + ["512", "512", "0.", "True"], 2.5 * FULL / 2),
        ("_efficient_attention_forward", [FLASH_Q, FLASH_KV], [""] * 6 + ["512", "512", "0.", "1"], FULL / 2),
        ("_flash_attention_forward", [[1024, 32, 128]] * 2, [""] * 5 + ["512", "512", "0.", "True"], None),
    ],
)
def test_attention_counts_half_where_it_is_causal(name, dims, concrete, flops):
    found = rows([operator(f"aten::{name}", 3, dims, concrete=concrete), kernel("attention", 3, 100.0)])
    (row,) = found.values()
    assert row.name == ("attention" if flops in (FULL, None) else "attention (causal: half)")
    assert row.tflops == (flops and pytest.approx(flops / 100e-6 / 1e12))


def test_fused_kernels_have_the_bytes_of_their_tensors():
    events = [
        operator("triton_poi_fused_add_0", 1, [[4096, 4096], [4096, 4096], []], kernel_backend="triton"),
        kernel("triton_poi_fused_add_0", 1, 40.0),
        operator("triton_poi_fused_embedding_1", 2, [[128256, 4096], [4096, 4096]], kernel_backend="triton"),
        kernel("triton_poi_fused_embedding_1", 2, 1000.0),
        operator("triton_poi_fused_cached_3", 4, [[4096, 4096]], kernel_backend="triton"),
        kernel("triton_poi_fused_cached_3", 4, 1.0),  # 33 TB/s: served from a cache
    ]
    found = rows(events)
    assert found["triton_poi_fused_add_0"].gb_s == pytest.approx(2 * 2 * 4096 * 4096 / 40e-6 / 1e9)  # 1,678
    assert found["triton_poi_fused_add_0"].roof_share == pytest.approx(1677.7 / 3350, rel=1e-4)
    assert found["triton_poi_fused_embedding_1"].gb_s is None, "it reads only some rows of a table"
    assert found["triton_poi_fused_cached_3"].gb_s is None
    assert all(row.tflops is None for row in found.values())


def test_what_is_not_known_is_no_figure():
    events = [
        operator("aten::mm", 1, [[64, 64], [64, 64]]),
        kernel("gemm", 1, 4.0),
        kernel("gemm", None, 400.0),
        operator("aten::sort", 2, [[64, 64]]),
        kernel("sort", 2, 5.0),
        operator("aten::mul", 3, [[64, 64], [64]]),
        kernel("mul", 3, 5.0),
        kernel("mul", 2, 3.0),
        operator("aten::mm", 4, [[64, 64], [64, 64]], "c10::Half"),
        kernel("half", 4, 5.0),
    ]
    found = rows(events)
    assert found["gemm"].tflops is None, "the launch of one call is not in the trace"
    assert found["gemm"].seconds_per_step == pytest.approx(404e-6)
    assert (found["sort"].tflops, found["sort"].gb_s, found["sort"].roof_share) == (None, None, None)
    assert found["mul"].gb_s is None, "one of its calls was launched by sort"
    assert found["half"].tflops is not None
    assert found["half"].roof_share is None, "configs/hardware has no peak of float16"
    assert sum(row.share for row in found.values()) == pytest.approx(1)


def test_every_dtype_has_its_own_peak():
    dims = [[4096, 4096], [4096, 4096]]
    events = [
        operator("aten::mm", 1, dims, FP32),
        kernel("fp32", 1, 4000.0),
        kernel("fp8", 2, 100.0),
        operator("aten::_scaled_mm", 2, dims, "c10::Float8_e4m3fn"),
    ]
    found = rows(events)
    assert found["fp32"].roof_share == pytest.approx(2 * 4096**3 / 66.9e12 / 4e-3)
    assert found["fp8"].roof_share == pytest.approx(2 * 4096**3 / 1978.9e12 / 1e-4)
    unknown_device = rows(events, device=None)["fp8"]
    assert (unknown_device.tflops, unknown_device.roof_share) == (found["fp8"].tflops, None)


def test_collectives_are_apart_with_their_bus_bandwidth():
    def collective(name: str, us: float, size: int, **args: Any) -> dict[str, Any]:
        facts = {"Collective name": name, "In msg nelems": size // 8, "Out msg nelems": size, "Group size": 8}
        return kernel(f"ncclDevKernel_{us}", 1, us, dtype="BFloat16", **facts, **args)

    events = [
        collective("_allgather_base", 1000.0, 2**27, **{"Process Group Description": "mesh_dp_shard"}),
        collective("allreduce", 2000.0, 2**27),
        collective("broadcast", 10.0, 2**20),
        collective("allreduce_x", 5.0, 0),
        kernel("Memcpy DtoD (Device -> Device)", 1, 10.0, "gpu_memcpy", bytes=10**7),
        kernel("Memcpy HtoD (Pageable -> Device)", 1, 10.0, "gpu_memcpy", bytes=10**5),
        kernel("Memset (Device)", 1, 10.0, "gpu_memset", bytes=10**7),
    ]
    found = rows(events)
    assert found["NCCL all_gather over dp_shard"].gb_s == pytest.approx(2**28 * 7 / 8 / 1e-3 / 1e9)
    assert found["NCCL all_reduce"].gb_s is None, "one call does not record its size"
    assert found["NCCL broadcast"].gb_s == pytest.approx(2**21 / 10e-6 / 1e9)
    assert [row.communication for row in found.values()] == [False] * 3 + [True] * 3, "collectives come last"
    assert found["NCCL all_reduce"].share == pytest.approx(2005 / 3015), "share of the collectives"
    assert found["Memcpy DtoD"].gb_s == pytest.approx(2000)
    assert found["Memcpy DtoD"].roof_share == pytest.approx(2000 / 3350)
    assert found["Memcpy HtoD"].roof_share is None, "the bandwidth of the link to the host is not known"
    assert found["Memset"].gb_s == pytest.approx(1000)
    one = rows([collective("allreduce", 2000.0, 2**27)])
    assert one["NCCL all_reduce"].gb_s == pytest.approx(2**28 * 2 * 7 / 8 / 2e-3 / 1e9)


def test_the_longest_come_first_and_no_more_than_asked():
    events = [kernel(f"kernel_{i}", None, float(i)) for i in range(1, 30)]
    events += [kernel(f"nccl_{i}", 1, 1.0) for i in range(5)]
    found = rows(events, device=None, most=3)
    assert list(found) == [*(f"kernel_{i}" for i in (29, 28, 27)), *(f"NCCL nccl_{i}" for i in range(3))]
    assert found["kernel_29"].share == pytest.approx(29 / sum(range(1, 30))), "of all kernels, also of others"


# A CPU


def test_operators_of_a_cpu_have_their_own_time_only():
    call, expanded = "## Call CompiledFxGraph {} ##".format, {"Input Strides": [[64, 1], [0, 1]]}
    events = [
        annotation("layers.0 forward", 0, 100),
        operator("Torch-Compiled Region: 0/0", 1, [], at=0, us=95),
        operator(call("fabc1234567"), 2, [], at=5, us=80),
        operator("aten::mm", 3, [[64, 32], [32, 16]], FP32, at=10, us=20),
        operator("aten::resolve_conj", 4, [[64, 16]], FP32, at=11, us=2),
        operator("_c10d_functional::wait_tensor", 5, [], at=40, us=30),
        annotation("layers.1 forward", 100, 50),
        operator(call("fabc1234567"), 6, [], at=110, us=20),
        annotation("head forward", 200, 50),
        operator(call("fdef9876543"), 7, [], at=210, us=10),
        operator(call("fdef0000000"), 8, [], at=225, us=5),
        operator(call("fout5555555"), 9, [], at=300, us=3),
        annotation("gloo:all_gather", 0, 40, GLOO),
        operator("aten::copy_", 10, [[64], [64]], FP32, at=1, us=8, thread=GLOO),
        operator("aten::add_", 11, [[64, 64], [64, 64]], FP32, at=400, us=10, **expanded),
    ]
    found = rows(events, device=None)
    us = {name: (round(row.seconds_per_step * 1e6, 3), row.calls_per_step) for name, row in found.items()}
    assert us == {
        "compiled forward of layers.*": (50, 2),
        "aten::mm": (18, 1),
        "aten::resolve_conj": (2, 1),
        "compiled forward of head": (15, 2),
        "compiled graph fout5555": (3, 1),
        "aten::add_": (10, 1),
        "gloo all_gather": (40, 1),
    }
    assert found["aten::mm"].tflops == pytest.approx(2 * 64 * 32 * 16 / 18e-6 / 1e12)
    # an expanded axis counts once
    assert found["aten::add_"].gb_s == pytest.approx(4 * (2 * 64 * 64 + 64) / 10e-6 / 1e9)
    assert found["gloo all_gather"].communication
    assert sum(row.share for row in found.values() if not row.communication) == pytest.approx(1)


def test_shapes_that_do_not_tell_give_nothing():
    assert work_of(operator("aten::mm", 1, [[64, 32], [31, 16]])) is None
    assert work_of(operator("aten::add", 1, [[2, 2], [2]], "complex")) is None
    assert work_of(operator("aten::mm", 1, [[64, 32]])) is None
    assert work_of({"name": "aten::mm", "args": {}}) is None
    added = work_of(operator("aten::add", 1, [[8, 1, 4], [5, 4], []]))
    assert added is not None
    assert added.bytes == 2 * (8 * 4 + 5 * 4 + 8 * 5 * 4)
