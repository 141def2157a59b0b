"""The owners of a trace's collectives, the advice for them, and traces without labels."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.tools.trace.advice import advise
from meshwright.tools.trace.analysis import ProfileAnalysis, analyze_profile, find_steps
from meshwright.tools.trace.cpu import cpu_steps
from meshwright.tools.trace.events import load_store
from meshwright.tools.trace.plan_comparison import to_timeline
from meshwright.tools.trace.prefetch import Communication
from meshwright.tools.trace.reader import find_mesh
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.tools.trace.test_profiled_steps import GATHER, GLOO, Event, label, op, write_trace

REDUCE = "c10d::allreduce_"
PURE, HYBRID, SPLIT = MeshPlan(1, 2, 1), MeshPlan(2, 2, 1), MeshPlan(1, 2, 2)


def sent(launch: str, carried: str, start_us: float) -> list[Event]:
    return [op(launch, start_us, start_us + 2), label(carried, start_us + 3, start_us + 40, GLOO)]


EVENTS = [
    label("ProfilerStep#5", 0, 1000),
    *sent(REDUCE, "gloo:all_reduce", 10),  # token count
    label("FSDP::all_gather (layers.0)", 100, 150),
    *sent(GATHER, "gloo:all_gather", 101),
    label("layers.0 forward", 200, 300),
    *sent(REDUCE, "gloo:all_reduce", 210),
    label("layers.0 backward", 400, 460),
    label("FSDP::post_backward_reshard (layers.0)", 500, 550),
    *sent(REDUCE, "gloo:all_reduce", 501),
    *sent(REDUCE, "gloo:all_reduce", 551),  # outside the label
    label("FSDP::post_backward_reduce (layers.0)", 600, 660),
    *sent(REDUCE, "gloo:all_reduce", 601),
    label("FSDP::root_post_backward_callback", 700, 750),
    *sent(REDUCE, "gloo:all_reduce", 701),
    label("Optimizer.step#Muon.step", 800, 900),
    *sent("c10d::alltoall_base_", "gloo:all_to_all", 801),
]


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        (SPLIT, ["", "dp_shard", "tp", "tp", "tp", "", "", ""]),
        (PURE, ["", "dp_shard", "", "", "", "", "", ""]),
        (HYBRID, ["", "dp_shard", "", "", "", "dp_replicate", "", ""]),
        (None, ["", "dp_shard", "tp", "", "", "dp_replicate", "", ""]),
    ],
)
def test_only_what_is_launched_in_fsdps_labels_is_fsdps(
    mesh: MeshPlan | None, axes: list[str], tmp_path: Path
) -> None:
    (step,) = cpu_steps(load_store(write_trace(tmp_path / "trace.json", EVENTS)), mesh)
    assert [transfer.axis for transfer in step.transfers] == axes
    assert [transfer.lane == "tp" for transfer in step.transfers] == [axis == "tp" for axis in axes]
    assert [transfer.unit for transfer in step.transfers] == ["layers.0" if axis else "" for axis in axes]
    assert step.transfers[-1].lane == "all_to_all"


def test_fsdp_casts_and_adds_whole_gradients_in_two_labels(tmp_path: Path) -> None:
    summed = [
        label("ProfilerStep#5", 0, 1000),
        label("layers.0 backward", 400, 460),
        label("FSDP::post_backward_accumulate (layers.0)", 500, 540),
        op("aten::add_", 505, 530),
        label("FSDP::post_backward_reshard (layers.0)", 550, 590),
        op("aten::_to_copy", 555, 580),
        label("FSDP::post_backward_reduce (layers.0)", 600, 660),
        op("aten::copy_", 605, 650),
    ]
    (step,) = cpu_steps(load_store(write_trace(tmp_path / "trace.json", summed)), PURE)
    assert [(work.work, work.unit) for work in step.works] == [
        ("sum", "layers.0"),
        ("sum", "layers.0"),
        ("copy_in", "layers.0"),
    ]


def test_the_mesh_is_that_of_the_runs_plan(tmp_path: Path) -> None:
    """None without a plan or with an invalid one."""
    trace = tmp_path / "profile" / "step-00000005" / "rank-0.json"
    trace.parent.mkdir(parents=True)
    write_trace(trace, EVENTS)
    assert find_mesh(trace) is None
    assert tp_transfers(trace) == 1
    (tmp_path / "config.yaml").touch()
    plan = plan_run(parse_config(["--config=llama_debug.yaml", "--parallel.tp=2"]).job, 4)
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(plan))
    assert find_mesh(trace) == plan.mesh == SPLIT
    assert tp_transfers(trace) == 3
    (tmp_path / "plan.yaml").write_text("no plan")
    assert find_mesh(trace) is None


def tp_transfers(trace: Path) -> int:
    return Counter(transfer.axis for transfer in find_steps(load_store(trace))[0].transfers)["tp"]


TP, GATHERS, REST = LANES = [("tp", "tp"), ("all_gather", "dp_shard"), ("all_reduce", "")]
ADVICE = [(TP, "a smaller parallel.tp "), (GATHERS, "HSDP"), (REST, "larger micro batch")]


@pytest.mark.parametrize(("longest", "advice"), ADVICE)
def test_exposed_communication_is_told_with_what_lessens_it(
    longest: tuple[str, str], advice: str, tmp_path: Path
) -> None:
    found = replace(_found(tmp_path), prefetch=(), communication=_rows(longest))
    (line,) = [line.text for line in advise(found) if "stay exposed" in line.text]
    assert re.search(rf"\(in flight while nothing computes.*other ranks.*: {longest[0]} 0\.09 ms, ", line)
    assert advice in line
    assert ("HSDP" in line) == (longest[1] == "dp_shard")
    assert "async_tp" not in line
    (line,) = [
        line.text for line in advise(replace(found, device_type="cuda")) if "stay exposed" in line.text
    ]
    assert ("parallel.async_tp=true" in line) == (longest[1] == "tp")


def _found(folder: Path) -> ProfileAnalysis:
    return analyze_profile({0: write_trace(folder / "trace.json", EVENTS)}, 0)


def _rows(longest: tuple[str, str]) -> list[Communication]:
    return [Communication(*each, 1, 90_000 if each == longest else 10_000, 0, 0) for each in LANES]


def test_a_trace_without_labels_is_of_the_threads_with_the_steps(tmp_path: Path) -> None:
    """As torch's profiler writes for any other program; and a step without any event."""
    step = label("ProfilerStep#5", 0, 1000)
    events = [step, op("aten::mm", 100, 400), op("aten::mm", 500, 600, GLOO)]
    found = analyze_profile({0: write_trace(tmp_path / "other.json", events)}, 0)
    assert found.spent_ns["compute"] == 300_000
    assert [(e.start_s, e.end_s) for e in to_timeline(found.step).events] == [(0.0001, 0.0004)]
    empty = analyze_profile({0: write_trace(tmp_path / "empty.json", [step])}, 0)
    assert empty.spent_ns["host"] == 1_000_000
    timeline = to_timeline(empty.step)
    assert (timeline.step_s, timeline.compute_s, timeline.events) == (0.001, 0.0, ())
