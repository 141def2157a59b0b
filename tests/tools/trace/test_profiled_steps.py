"""tools.trace on a synthetic CPU trace and a synthetic GPU trace, for which every figure is known."""

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.parallel.planner.cost_model import ModuleTimes, PhaseTimes, StepTimes, UnitTimes
from meshwright.parallel.planner.step_time import TaskSink
from meshwright.parallel.planner.timeline import Timeline
from meshwright.tools.trace.advice import advise
from meshwright.tools.trace.analysis import ProfileAnalysis, analyze_profile
from meshwright.tools.trace.plan_comparison import to_timeline
from meshwright.tools.trace.prefetch import ThreadSink, sum_communication, to_shares, waits_with_depth
from meshwright.tools.trace.steps import (
    ProfiledStep,
    Transfer,
    UnitRun,
    as_spans,
    clip,
    intersect,
    subtract,
    total,
    union,
)
from meshwright.tools.trace.stragglers import find_slow_units, find_stragglers

ORIGIN_US = 4478494128299.831  # from a real trace
MAIN, BACKWARD, GLOO, GPU_MAIN, GPU_NCCL = 11, 12, 21, 7, 20
GATHER, REDUCE = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
MESH = {"pg_config": [{"pg_name": "3", "pg_desc": "mesh_dp_shard"}, {"pg_name": "5", "pg_desc": "mesh_tp"}]}
Event = dict[str, Any]


def span(category: str, name: str, start_us: float, end_us: float, thread: int = MAIN, **args: Any) -> Event:
    times = {"ts": round(ORIGIN_US + start_us, 3), "dur": end_us - start_us}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": args}


def op(name: str, start_us: float, end_us: float, thread: int = MAIN) -> Event:
    return span("cpu_op", name, start_us, end_us, thread)


def label(name: str, start_us: float, end_us: float, thread: int = MAIN) -> Event:
    return span("user_annotation", name, start_us, end_us, thread)


NCCL = {"Collective name": "_allgather_base", "Process Group Name": "3", "dtype": "BFloat16"}
NCCL |= {"In msg nelems": 50, "Out msg nelems": 100}


def kernel(number: int, called_us: float, start_us: float, end_us: float, thread: int = MAIN) -> list[Event]:
    """A kernel and the call of 2 us that launched it."""
    return [_call(number, called_us, thread), _on_gpu("gemm", number, start_us, end_us, GPU_MAIN)]


def all_gather(number: int, called_us: float, start_us: float, end_us: float) -> list[Event]:
    name = "ncclDevKernel_AllGather_RING_LL(x)"
    return [_call(number, called_us, MAIN), _on_gpu(name, number, start_us, end_us, GPU_NCCL, **NCCL)]


def _call(number: int, at_us: float, thread: int) -> Event:
    return span("cuda_runtime", "cudaLaunchKernel", at_us, at_us + 2, thread, correlation=number)


def _on_gpu(name: str, number: int, start_us: float, end_us: float, stream: int, **more: Any) -> Event:
    return span("kernel", name, start_us, end_us, stream, correlation=number, stream=stream, **more)


def write_trace(path: Path, events: Iterable[Event], **header: Any) -> Path:
    """Write a trace as torch's profiler does, with the other keys before the events."""
    before = {"schemaVersion": 1, "baseTimeNanoseconds": 10**18, **header}
    path.write_text(json.dumps({**before, "traceEvents": list(events), "traceName": str(path)}))
    return path


CPU_EVENTS = [
    label("ProfilerStep#5", 0, 10000),
    label("FSDP::pre_forward (layers.0)", 100, 600),
    label("FSDP::all_gather (layers.0)", 100, 200),
    op(GATHER, 150, 180),
    label("gloo:all_gather", 200, 500, GLOO),
    op("aten::copy_", 480, 490, GLOO),  # on gloo's thread, which does not train
    label("FSDP::all_gather_copy_out (layers.0)", 210, 600),
    op("aten::copy_", 550, 590),
    label("layers.0 forward", 600, 1600),
    op("aten::mm", 600, 1500),
    op("aten::resolve_conj", 700, 710),  # nested
    label("FSDP::pre_forward (layers.1)", 1600, 2810),
    label("FSDP::all_gather (layers.1)", 1600, 1700),
    op(GATHER, 1650, 1680),
    label("gloo:all_gather", 1700, 2700, GLOO),
    label("FSDP::all_gather_copy_out (layers.1)", 1710, 2800),
    op("aten::copy_", 2700, 2800),
    label("FSDP::forward_prefetch for layers.2", 2810, 2900),
    label("FSDP::all_gather (layers.2)", 2810, 2900),
    op(GATHER, 2820, 2830),
    label("gloo:all_gather", 2900, 3200, GLOO),
    label("layers.1 forward", 2900, 3900),
    op("aten::mm", 2900, 3900),
    label("FSDP::pre_forward (layers.2)", 3900, 4000),
    label("FSDP::all_gather_copy_out (layers.2)", 3900, 4000),
    op("aten::copy_", 3910, 3990),
    op("Torch-Compiled Region: 0/0", 3995, 4505),
    label("layers.2 forward", 4000, 4500),
    op("## Call CompiledFxGraph abc ##", 4000, 4500),
    op("_c10d_functional::wait_tensor", 4100, 4200),
    op("aten::mm", 4300, 4400),
    op("autograd::engine::evaluate_function: MmBackward0", 4990, 6010),
    label("layers.2 backward", 5000, 6000),
    op("aten::mm", 5000, 5900),
    label("FSDP::post_backward_reduce (layers.2)", 6100, 7100),
    op(REDUCE, 6150, 6200),
    op("aten::copy_", 6160, 6190),  # gloo's copy: communication, not compute
    label("gloo:all_reduce", 6300, 7000, GLOO),
    label("FSDP::root_post_backward_callback", 7100, 7200),
    op("c10d::allreduce_", 7300, 7320),
    label("gloo:all_reduce", 7350, 7450, GLOO),
    label("Optimizer.step#AdamW.step", 8000, 9000),
    op("aten::_fused_adamw_", 8100, 8900),
]
CUDA_EVENTS = [
    label("ProfilerStep#5", 0, 1000),
    label("layers.0 forward", 10, 20),
    *kernel(1, 10, 100, 400),
    label("FSDP::pre_forward (layers.1)", 20, 40),
    label("FSDP::all_gather (layers.1)", 20, 30),
    *all_gather(2, 22, 110, 510),
    label("FSDP::all_gather_copy_out (layers.1)", 30, 40),
    *kernel(3, 31, 520, 540),
    label("layers.1 forward", 40, 50),
    *kernel(4, 41, 540, 740),
    label("layers.1 backward", 840, 900, BACKWARD),
    *kernel(5, 848, 860, 960, BACKWARD),
    label("FSDP::root_post_backward_callback", 910, 915, BACKWARD),
    label("Optimizer.step#AdamW.step", 950, 990),
    *kernel(6, 963, 970, 1010),
    label("ProfilerStep#6", 1000, 1300),
    *kernel(7, 1103, 1110, 1210),
    *kernel(8, 1123, 1250, 1280),
]


def shares_us(found: ProfileAnalysis) -> dict[str, float]:
    return {kind: ns / 1000 for kind, ns in found.spent_ns.items()}


@pytest.fixture
def cpu(tmp_path: Path) -> ProfileAnalysis:
    header = {"meshwright": {"rank": 0, "device_type": "cpu"}}
    return analyze_profile({0: write_trace(tmp_path / "cpu.json", CPU_EVENTS, **header)}, 0)


@pytest.fixture
def cuda(tmp_path: Path) -> ProfileAnalysis:
    header = {"distributedInfo": {"rank": 3, **MESH}}
    return analyze_profile({0: write_trace(tmp_path / "cuda.json", CUDA_EVENTS, **header)}, 0)


def test_shares_of_a_step_on_a_cpu_are_exact(cpu: ProfileAnalysis) -> None:
    """Computing: 40 + 900 + 100 + 1000 + 80 + 400 (a compiled graph without its wait) + 900 + 800. In
    flight: 2400, of which 300 under layers.1's product; launching: 30 + 30 + 10 + 50 + 20; from launch to
    start: 20 + 20 + 70 + 100 + 30. The rest is Python."""
    assert shares_us(cpu) == {"compute": 3920, "overlapped": 300, "exposed": 2240, "host": 3300, "idle": 240}
    assert sum(to_shares(cpu.spent_ns).values()) == 1.0
    assert sum(cpu.spent_ns.values()) == cpu.step.length_ns == 10_000_000


def test_shares_of_a_step_on_a_gpu_are_exact(cuda: ProfileAnalysis) -> None:
    """From the step's start on the CPU to the next step's first kernel, at 1110. A gap is host-bound until
    the launch of the kernel that ends it: 12 of 100, 0 of 10, 110 of 120, 5 of 10, 95 of 100."""
    first, second = (replace(cuda, step=step) for step in cuda.steps)
    assert shares_us(first) == {"compute": 370, "overlapped": 290, "exposed": 110, "host": 222, "idle": 118}
    assert shares_us(second) == {"compute": 130, "overlapped": 0, "exposed": 0, "host": 20, "idle": 40}
    assert (cuda.rank, cuda.device_type) == (3, "cuda")


def test_communication_by_axis_and_what_of_it_is_hidden(cpu: ProfileAnalysis, cuda: ProfileAnalysis) -> None:
    rows = [(c.lane, c.axis, c.count, c.ns / 1000, c.hidden_ns / 1000) for c in cpu.communication]
    assert rows == [
        ("all_gather", "dp_shard", 3, 1600, 300),
        ("reduce_scatter", "dp_shard", 1, 700, 0),
        ("all_reduce", "", 1, 100, 0),
    ]
    (gather,) = sum_communication(cuda.steps[0])
    assert (gather.lane, gather.axis, gather.bytes) == ("all_gather", "dp_shard", 200)
    assert (gather.ns, gather.hidden_ns) == (400_000, 290_000)


def test_each_gather_is_judged_and_the_depth_that_mends_it_found(cpu: ProfileAnalysis) -> None:
    """The all-gather of layers.1 is launched when it is needed, at 1600, and ends at 2700. With depth 1 it
    is launched together with layers.0's."""
    (prefetch,) = cpu.prefetch
    start = cpu.step.start_ns
    times = [
        tuple((ns - start) / 1000 for ns in (*g.times_ns.values(), g.waited_ns + start))
        for g in prefetch.gathers
    ]
    assert times == [(150, 200, 500, 100, 400), (1650, 1700, 2700, 1600, 1100), (2820, 2900, 3200, 3900, 0)]
    assert [gather.ahead for gather in prefetch.gathers] == [0, 0, 1]
    assert [gather.verdict for gather in prefetch.gathers] == [
        "waited 0.40 ms: the first one, no compute before it",
        "late by 1.10 ms (depth 1 hides it)",
        "in time",
    ]
    assert (prefetch.waits_ns[:3], prefetch.best, prefetch.used) == ((1_600_000, 300_000, 300_000), 1, 0)
    assert prefetch.saving_ns == 1_200_000
    (line, *_) = [line.text for line in advise(cpu) if "forward_prefetch" in line.text]
    assert re.match(
        r"set parallel\.forward_prefetch=1: saves about 1\.20 ms .* 0 .*forward.*layers\.1$", line
    )


def test_on_a_gpu_a_unit_waits_from_the_kernel_before_to_its_copy(cuda: ProfileAnalysis) -> None:
    (prefetch,) = cuda.prefetch
    (gather,) = prefetch.gathers
    start = cuda.steps[0].start_ns
    times = {name: (ns - start) / 1000 for name, ns in gather.times_ns.items()}
    assert times == {"issued": 22, "started": 110, "finished": 510, "needed": 400}
    assert (gather.waited_ns, gather.ahead) == (110_000, 0)


def in_us(timeline: Timeline, lane: str) -> list[tuple[Any, ...]]:
    shown = [event for event in timeline.events if event.lane == lane]
    return [(e.work, e.unit, e.phase, round(e.start_s * 1e6, 3), round(e.end_s * 1e6, 3)) for e in shown]


def test_the_timeline_of_a_cpu_step(cpu: ProfileAnalysis) -> None:
    timeline = to_timeline(cpu.step)
    assert in_us(timeline, "compute") == [
        ("copy_out", "layers.0", "forward", 550, 590),
        ("forward", "layers.0", "forward", 600, 1500),
        ("copy_out", "layers.1", "forward", 2700, 2800),
        ("forward", "layers.1", "forward", 2900, 3900),
        ("copy_out", "layers.2", "forward", 3910, 3990),
        ("forward", "layers.2", "forward", 4000, 4100),
        ("forward", "layers.2", "forward", 4200, 4500),
        ("backward", "layers.2", "backward", 5000, 5900),
        ("optimizer", "", "optimizer", 8100, 8900),
    ]
    assert in_us(timeline, "exposed") == [
        ("all_gather", "layers.0", "forward", 200, 500),
        ("all_gather", "layers.1", "forward", 1700, 2700),
        ("reduce_scatter", "layers.2", "backward", 6300, 7000),
        ("all_reduce", "", "optimizer", 7350, 7450),
    ]
    assert (timeline.step_s, timeline.compute_s, timeline.exposed_s) == (0.01, 0.00422, 0.00224)
    assert timeline.exposed_by_lane == pytest.approx(
        {"all_gather": 0.0013, "reduce_scatter": 0.0007, "all_reduce": 0.0001}
    )


def test_the_timeline_of_a_gpu_step(cuda: ProfileAnalysis) -> None:
    timeline = to_timeline(cuda.steps[0])
    assert in_us(timeline, "compute") == [
        ("forward", "layers.0", "forward", 100, 400),
        ("copy_out", "layers.1", "forward", 520, 540),
        ("forward", "layers.1", "forward", 540, 740),
        ("backward", "layers.1", "backward", 860, 960),
        ("optimizer", "", "optimizer", 970, 1010),
    ]
    assert in_us(timeline, "all_gather") == [("all_gather", "layers.1", "forward", 110, 510)]
    assert in_us(timeline, "exposed") == [("all_gather", "layers.1", "forward", 400, 510)]
    assert len(timeline.rounds) == 2


def waits(gather: float, scatter: float, phase: str, sink: type[TaskSink] = ThreadSink) -> list[list[int]]:
    """The waits of three units with 3 s of compute at depths 0, 1 and 2, in s."""
    unit, compute = UnitTimes(gather, gather, 0, 0, scatter, 0), PhaseTimes(3)
    units, modules = dict.fromkeys("abc", unit), dict.fromkeys("abc", ModuleTimes(compute, compute))
    times = StepTimes(units, modules, 0, True, {"all_gather": 0, "reduce_scatter": 0})
    by_depth = (waits_with_depth(times, phase, depth, sink) for depth in (0, 1, 2))
    return [[by_unit[name] // 10**9 for name in "abc"] for by_unit in by_depth]


def test_gathers_queue_behind_one_another_and_behind_reductions() -> None:
    assert waits(2, 0, "forward") == [[2, 2, 2], [2, 0, 0], [2, 0, 0]]
    assert waits(5, 0, "forward") == [[5, 5, 5], [5, 2, 2], [5, 2, 2]]
    # Without prefetching an all-gather waits for the reduce-scatter of the unit before. With depth 1 the
    # third is gathered from 9 to 11, after the first one's reduce-scatter, for which the second's waits.
    assert waits(2, 4, "backward")[:2] == [[2, 6, 6], [2, 0, 2]]
    # A host that launches ahead gathers in a forward as soon as the link is free.
    assert waits(5, 0, "forward", TaskSink)[0] == [5, 2, 2]
    assert waits(2, 4, "backward", TaskSink)[:2] == [[2, 6, 6], [2, 0, 2]]


def a_step(runs: Sequence[UnitRun] = (), transfers: Sequence[Transfer] = (), rank: int = 0) -> ProfiledStep:
    return ProfiledStep(1, rank, 0, 1000, (), transfers, runs, ())


def test_a_unit_slower_than_its_equals_is_named_and_one_of_another_shape_is_not() -> None:
    lengths = {"embed": 900, "layers.0": 10, "layers.1": 11, "layers.2": 25, "layers.3": 10, "layers.4": 12}
    steps = [
        a_step([UnitRun(unit, "forward", 0, 0, length + more) for unit, length in lengths.items()])
        for more in (0, 3)
    ]
    (slow,) = find_slow_units(steps)
    assert (slow.unit, slow.phase, slow.ns, slow.equals_ns, slow.equals) == ("layers.2", "forward", 25, 10, 4)
    # nearly equal units; and one many spreads above its peers, but less than a quarter
    for steady in (range(10, 16), (100, 100, 100, 100, 101)):
        assert not find_slow_units(
            [a_step([UnitRun(f"layers.{i}", "forward", 0, 0, ns) for i, ns in enumerate(steady)])]
        )


def sent(issued_ns: int, end_ns: int, unit: str = "layers.0") -> Transfer:
    return Transfer("all_gather", "dp_shard", unit, "forward", 0, issued_ns, issued_ns, end_ns, True, 0, unit)


def test_the_rank_that_comes_last_is_charged_with_the_others_waits() -> None:
    """Times are compared by the clock of one host; otherwise the ends are aligned: rank 1 is 70 behind."""
    ranks = {
        0: [a_step((), [sent(10, 50), sent(60, 90, "layers.1")])],
        1: [a_step((), [sent(100, 120, "layers.0"), sent(135, 160, "layers.1")], 1)],
    }
    clocks = {0: (1000, "a"), 1: (930, "a")}
    rows, clock = find_stragglers(ranks, clocks, on_device=False, mesh=None)
    assert shares_of(rows) == [(1, 1.0, 25, 0), (0, 0.0, 0, 25)]
    assert clock == "one host's clock"
    apart = {0: (0, "a"), 1: (5, "b")}
    aligned, clock = find_stragglers(ranks, apart, on_device=False, mesh=None)
    assert [(row.rank, row.others_waited_ns) for row in aligned] == [(1, 25), (0, 0)]
    assert "aligned on the ends" in clock


def test_ranks_are_compared_with_those_they_meet_and_one_odd_step_counts_for_nothing() -> None:
    """2 x 2 ranks: rank 1 is late for its shard group (ranks 1 and 3, at the same tp position); in step 1
    by much, as with a profiler that starts late."""
    ranks = {
        rank: [
            replace(a_step((), [sent(10 + late * (rank == 1), 500)], rank), number=number)
            for number, late in enumerate((400, 30, 20), start=1)
        ]
        for rank in range(4)
    }
    clocks = dict.fromkeys(ranks, (0, "a"))
    rows, _ = find_stragglers(ranks, clocks, on_device=False, mesh=MeshPlan(1, 2, 2))
    assert shares_of(rows) == [(1, 1.0, 30, 0), (0, 0.0, 0, 0), (2, 0.0, 0, 0), (3, 0.0, 0, 30)]


def shares_of(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    return [(row.rank, row.last_share, row.others_waited_ns, row.waited_ns) for row in rows]


def test_a_random_set_of_times_is_what_its_moments_are() -> None:
    """Compared with sets of integer moments."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    numbers = np.random.default_rng(seed)
    for _ in range(200):
        first, second = (
            union(as_spans([(int(start), int(start + length)) for start, length in pairs]))
            for pairs in numbers.integers(0, 12, (2, int(numbers.integers(0, 6)), 2))
        )
        one, other = moments(first), moments(second)
        assert moments(intersect(first, second)) == one & other
        assert moments(subtract(first, second)) == one - other
        assert moments(union(np.concatenate([first, second]))) == one | other
        assert moments(clip(first, 3, 8)) == one & set(range(3, 8))
        assert total(first) == len(one)


def moments(spans: np.ndarray) -> set[int]:
    return {t for start, end in spans.tolist() for t in range(start, end)}


def test_time_in_two_operators_of_a_thread_counts_once(tmp_path: Path) -> None:
    """The second operator starts during the first and ends after it."""
    events = [label("ProfilerStep#5", 0, 1000), op("aten::mm", 100, 300), op("aten::add", 200, 400)]
    step = analyze_profile({0: write_trace(tmp_path / "cpu.json", events)}, 0).step
    spans = [((w.start_ns - step.start_ns) / 1000, (w.end_ns - step.start_ns) / 1000) for w in step.works]
    assert spans == [(100, 300), (300, 400)]


def test_a_copy_of_several_kernels_is_waited_for_once(tmp_path: Path) -> None:
    copies = [
        label("FSDP::all_gather_copy_out (layers.1)", 30, 60),
        *kernel(1, 31, 520, 540),
        *kernel(2, 36, 540, 560),
    ]
    events = [label("ProfilerStep#5", 0, 1000), *kernel(3, 10, 100, 400), *copies]
    (need,) = analyze_profile({0: write_trace(tmp_path / "cuda.json", events)}, 0).step.needs
    assert (need.unit, need.served_ns - need.needed_ns) == ("layers.1", 120_000)
