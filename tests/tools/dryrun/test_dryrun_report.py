"""The counts of `tools.dryrun` from a small recorded step, and the bytes of operators.

recorded/ has 17 calls of a step of llama_debug on two GPUs, as the fake GPU and torch's profiler wrote them.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.dryrun.launches import read_recorded_step
from meshwright.tools.dryrun.operators import moved_bytes, read_operators
from meshwright.tools.dryrun.report import DryRun, as_json, as_text, read_dry_run
from meshwright.tools.plan.report import PlanReport, Target, make_report
from meshwright.train.config_parser import parse_config

RECORDED = Path(__file__).with_name("recorded")
TOKENS, DIM, KV_DIM, VOCABULARY = 4 * 256, 192, 96, 264  # of a micro batch of llama_debug
BFLOAT16, FLOAT32 = 2, 4
HIDDEN = TOKENS * DIM * BFLOAT16  # x[B, T, D]


@pytest.fixture(scope="module")
def run() -> DryRun:
    return read_dry_run(RECORDED)


@pytest.fixture(scope="module")
def report() -> PlanReport:
    job = parse_config(["--config=llama_debug.yaml"]).job
    return make_report(job, Target(2, 2, load_hardware()["h100-sxm"]))


def test_the_step_is_counted(run: DryRun) -> None:
    assert run.launches == {"torch": 7, "cublas": 2, "cudnn": 1, "triton": 2}
    assert run.host_waits == run.device_allocations == {}
    assert [(use.kernels, use.copies, dict(use.collectives)) for use in run.streams] == [
        (12, 1, {"all_reduce": 2}),
        (0, 0, {"all_gather": 1}),
        (0, 0, {"reduce_scatter": 1}),
    ]
    waits = {(wait.stream, wait.awaited) for wait in run.stream_waits}
    assert {(0, 1), (0, 2), (1, 0), (2, 0)} <= waits
    assert [(copy.kind, copy.count, copy.bytes) for copy in run.copies] == [("HtoD", 1, 240)]


def test_collectives_have_the_axes_of_tools_simulate(run: DryRun) -> None:
    gathered, reduced = (VOCABULARY * DIM * BFLOAT16, (VOCABULARY + 1) * DIM * FLOAT32)  # the head has a norm
    assert [(c.op, c.axis, c.bytes, c.stream) for c in run.collectives] == [
        ("all_reduce", "world", 4, 0),
        ("all_gather", "dp_shard", gathered, 1),
        ("reduce_scatter", "dp_shard", reduced, 2),
        ("all_reduce", "world", 4, 0),
    ]


def test_each_kernel_has_the_bytes_of_its_tensors(run: DryRun) -> None:
    weight = DIM * DIM * BFLOAT16
    grouped = TOKENS * KV_DIM * BFLOAT16
    log_sums = TOKENS * 8 * FLOAT32  # of 8 heads
    expected = {
        "product 1024 x 192 x 192, bfloat16": 2 * (2 * HIDDEN + weight),
        # reads the table, which is smaller than the result, and one index per token; the index is expanded
        "vectorized_gather_kernel": VOCABULARY * DIM * BFLOAT16 + TOKENS * 8 + HIDDEN,
        "chunk_cat_cuda_kernel": (VOCABULARY + 1) * DIM * (BFLOAT16 + FLOAT32),
        "split_with_sizes_copy_out_contiguous_no_cast_kernel": 2 * VOCABULARY * DIM * BFLOAT16,
    }
    counted = {kernel.name: kernel for kernel in run.kernels}
    assert {name: counted[name].bytes for name in expected} == expected
    attention = counted["_cudnn_attention_forward"].bytes
    assert attention == pytest.approx(2 * HIDDEN + 2 * grouped + log_sums, rel=1e-3)  # and two seeds
    fused = counted["triton_per_fused__fused_rms_norm_0"]
    norm = 2 * HIDDEN + 2 * TOKENS * FLOAT32 + DIM * BFLOAT16  # inductor counts the root of each row twice
    assert fused.bytes == 2 * norm
    assert (fused.calls, fused.registers, fused.spills) == (2, 60, 0)


def test_unknown_bytes_are_no_guess(run: DryRun) -> None:
    unknown = [kernel for kernel in run.kernels if kernel.bytes is None]
    assert {kernel.name for kernel in unknown} == {"embedding_backward_feature_kernel", "lpnorm_cleanup"}
    assert run.unknown_launches == 2
    assert run.kernels[-2:] == tuple(unknown), "they are last"
    sizes = [kernel.bytes for kernel in run.kernels[:-2]]
    assert sizes == sorted(sizes, key=lambda size: size or 0, reverse=True)
    assert sum(kernel.share or 0 for kernel in run.kernels) == pytest.approx(1)


def test_bytes_of_an_operator_count_once(run: DryRun, tmp_path: Path) -> None:
    """Long lists of tensors take several launches of one kernel."""
    name = "multi_tensor_apply_kernel FusedAdamMathFunctor"
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    lines = (tmp_path / "log.1").read_text().splitlines(keepends=True)
    again = [line for line in lines for _ in range(1 + ("fused_adamw" in line))]
    (tmp_path / "log.1").write_text("".join(again))
    trace = json.loads((tmp_path / "trace.json").read_text())
    (launch,) = [e for e in trace["traceEvents"] if e["cat"] == "kernel" and "FusedAdam" in e["name"]]
    trace["traceEvents"].append(launch)
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    before, after = (
        {kernel.name: kernel for kernel in counted.kernels}[name] for counted in (run, read_dry_run(tmp_path))
    )
    assert (before.calls, after.calls) == (1, 2)
    assert after.bytes == before.bytes


def test_a_graph_has_the_kernels_of_one_call() -> None:
    (graph,) = read_recorded_step(RECORDED).graphs
    assert (graph.units, graph.phase, graph.calls) == (("layers.0", "layers.1"), "forward", 2)
    assert [kernel.library for kernel in graph.kernels] == ["triton", "cublas", "cudnn"]


def test_the_report_has_the_figures_of_the_contract(run: DryRun, report: PlanReport) -> None:
    document = json.loads(json.dumps(as_json(run, report)))
    assert document["launches"] == 12
    assert document["host_waits"] == document["device_allocations"] == 0
    assert document["peak_memory_gib"] == run.peak_bytes / 2**30
    assert document["predicted"]["peak_memory_gib"] == report.memory.peak_bytes / 2**30
    assert document["totals"][0] == {"op": "reduce_scatter", "axis": "dp_shard", "count": 1, "bytes": 203520}
    assert {"name", "bytes", "registers", "spills"} <= document["kernels"][0].keys()
    text = as_text(run, report, first=3)
    assert "7 more kernels (--all" in text
    assert "10 of 12 launches" in text
    assert "layers.[0-5]" in text, "the plan"


def tensor(shape: list[int], strides: list[int] | None = None, place: int = 1) -> tuple[Any, ...]:
    """A float32 tensor of an execution trace: value, shape, strides and type."""
    whole = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    value = [place, place, 0, math.prod(shape), 4, "cuda:0"]
    return value, shape, whole if strides is None else strides, "Tensor(float)"


def operator(schema: str, inputs: list[tuple[Any, ...]], outputs: list[tuple[Any, ...]]) -> dict[str, Any]:
    def columns(rows: list[tuple[Any, ...]]) -> dict[str, Any]:
        names = ("values", "shapes", "strides", "types")
        return {name: [row[at] for row in rows] for at, name in enumerate(names)}

    return {
        "name": schema.split("(")[0].partition(".")[0],
        "inputs": columns(inputs),
        "outputs": columns(outputs),
        "attrs": [{"name": "op_schema", "value": schema}],
    }


A, B = tensor([10]), tensor([10], place=2)
SCALAR = (1, [], [], "Int")


@pytest.mark.parametrize(
    ("schema", "inputs", "outputs", "elements"),
    [
        ("aten::add.Tensor(Tensor self, Tensor other) -> Tensor", [A, B], [tensor([10], place=3)], 30),
        ("aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)", [A, B], [A], 30),
        ("aten::copy_(Tensor(a!) self, Tensor src, bool b=False) -> Tensor(a!)", [A, B, SCALAR], [A], 20),
        ("aten::fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)", [A, SCALAR], [A], 10),
        ("aten::f.out(Tensor self, int[2] d=[0, 1], *, Tensor(a!) out) -> ()", [A, SCALAR, B], [], 20),
        ("ours::write(Tensor(a0!) x, Tensor y) -> ()", [A, tensor([5, 10], [0, 1], 2)], [], 30),
        ("aten::index_select(Tensor self, int d, Tensor i) -> Tensor", [A, SCALAR, B], [], None),
        ("aten::index_put_(Tensor(a!) self, Tensor i) -> Tensor(a!)", [A, B], [A], None),
    ],
)
def test_bytes_follow_from_what_an_operator_reads_and_writes(
    schema: str, inputs: list[tuple[Any, ...]], outputs: list[tuple[Any, ...]], elements: int | None
) -> None:
    assert moved_bytes(operator(schema, inputs, outputs)) == (elements and elements * 4)


def test_a_list_of_tensors_counts_as_its_tensors() -> None:
    (norm,) = [
        node
        for node in read_operators(RECORDED / "operators.json").values()
        if node["name"] == "aten::_foreach_norm"
    ]
    values = [value for value in norm["inputs"]["values"][0] if isinstance(value, list)]
    moved = moved_bytes(norm)
    assert moved is not None
    assert moved >= sum(value[3] * value[4] for value in values)
