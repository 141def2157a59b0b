"""The message of a hang, made from the reports of all ranks, and the position of a thread."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from traceback import FrameSummary

import pytest

from meshwright.train.fault_tolerance import stack_traces
from meshwright.train.fault_tolerance.hang_diagnosis import RankReport, TimedOut, diagnose
from meshwright.train.fault_tolerance.stack_traces import TORCH, find_where

# The message


FIRED = TimedOut(0, 4, "step", 120, 600.4, "step_s", 600.0)
WAITS = RankReport(
    0, "step", 120, 600.0, place="train/step.py:70 train_step", waits_in="all_reduce", path=("a", "b")
)
LOADS = replace(WAITS, place="train/data/loader.py:61 next", waits_in="")
GATHERS = replace(WAITS, place="train/metrics/collector.py:88 log", waits_in="all_gather_object")


def ranks(*reports: RankReport) -> list[RankReport]:
    return [replace(report, rank=rank) for rank, report in enumerate(reports)]


def assert_in_order(text: str, *facts: str) -> None:
    """The text starts with the first fact, and contains the others after it in this order."""
    assert text.startswith(facts[0]), text
    end = 0
    for fact in facts:
        assert fact in text[end:], (fact, text)
        end = text.index(fact, end) + len(fact)


STEP_70, NEXT_61 = "train/step.py:70 train_step", "train/data/loader.py:61 next"
IN_REDUCE = f"all_reduce ({STEP_70})"
ELSEWHERE = replace(LOADS, place="train/metrics/collector.py:9 log")
HEADLINES = {  # facts, separated by " | ", in this order
    (WAITS, WAITS, LOADS, WAITS): f"rank 2 is at {NEXT_61} | ranks 0-1, 3 wait in {IN_REDUCE}",
    (WAITS, LOADS, LOADS, WAITS): f"ranks 1-2 are at {NEXT_61} | ranks 0, 3 wait in {IN_REDUCE}",
    (WAITS, replace(LOADS, step=119)): (
        f"rank 1 is behind | in step 119 | {NEXT_61} | rank 0 waits in {IN_REDUCE}"
    ),
    (WAITS, replace(LOADS, section="evaluation")): "rank 1 is ahead | in evaluation at step 120",
    (WAITS, replace(LOADS, section="first step")): "rank 1 is behind | in first step (120)",
    (WAITS, WAITS, WAITS, GATHERS): (
        f"desynchronized | all_reduce called from {STEP_70} by ranks 0-2 | "
        "all_gather_object called from train/metrics/collector.py:88 log by rank 3"
    ),
    (WAITS, replace(WAITS, place="train/step.py:71 train_step")): (
        f"desynchronized | all_reduce called from {STEP_70} by rank 0 | "
        "all_reduce called from train/step.py:71 train_step by rank 1"
    ),
    (WAITS, replace(WAITS, step=119)): f"desynchronized | {IN_REDUCE} | rank 1 is in step 119 | ahead",
    (WAITS, WAITS): f"all 2 ranks wait in the same {IN_REDUCE} | check the network",
    (WAITS, replace(WAITS, silent_s=42.0), LOADS): (
        "rank 1 does not answer | no heartbeat for about 42 s | process stopped or killed | host down"
    ),
    (replace(WAITS, silent_s=42.0), replace(WAITS, silent_s=44.0), LOADS): (
        "ranks 0-1 do not answer | no heartbeat for about 42 s or more | processes stopped or killed"
    ),
    (WAITS, RankReport(1, "set-up", silent_s=math.inf)): "rank 1 never sent a heartbeat",
    (RankReport(0, "ended", 119), WAITS): "rank 0 has ended | others continue | the last step",
    (LOADS,): f"rank 0 is at {NEXT_61}",
    (WAITS,): f"rank 0 waits in {IN_REDUCE}",
    (LOADS, LOADS): f"all 2 ranks are at {NEXT_61} | none is behind",
    (LOADS, replace(LOADS, step=119)): f"rank 1 is behind the others | in step 119 at {NEXT_61}",
    (LOADS, LOADS, ELSEWHERE): "rank 2 is at train/metrics/collector.py:9 log | others",
    (LOADS, ELSEWHERE): "the ranks are at different places | none stands out",
    (WAITS, replace(LOADS, place="", inside="threading.py:9 wait")): "rank 1 is at threading.py:9 wait",
}


@pytest.mark.parametrize(("reports", "facts"), HEADLINES.items(), ids=HEADLINES.values())
def test_the_headline_names_who_is_to_blame_and_why(reports: tuple[RankReport, ...], facts: str) -> None:
    of_ranks = ranks(*reports)
    message = diagnose(of_ranks, FIRED)
    assert_in_order(message.splitlines()[0], "STUCK: ", *facts.split(" | "))
    assert diagnose(of_ranks[::-1], FIRED) == message  # in any order of the reports


def test_the_whole_message() -> None:
    loads = replace(
        LOADS,
        inside="queue.py:171 get",
        path=("train/loop.py:60 train_loop", "train/data/loader.py:61 next"),
        collectives=(("mesh_tp of ranks 0-3", 1204),),
    )
    waits = replace(WAITS, collectives=(("mesh_tp of ranks 0-3", 1205),))
    head, *lines = diagnose(ranks(waits, waits, loads, waits), FIRED).splitlines()
    assert head.startswith("STUCK: rank 2 is at train/data/loader.py:61 next")
    assert lines[:2] == [
        "  rank 2: step 120 for 600 s, at train/data/loader.py:61 next (in queue.py:171 get)",
        "  ranks 0-1, 3: step 120 for 600 s, in all_reduce called from train/step.py:70 train_step",
    ]
    counts, path, timeout = lines[2:]
    assert counts.endswith(" in mesh_tp of ranks 0-3: 1,204 by rank 2; 1,205 by ranks 0-1, 3")
    assert path.endswith(" rank 2: train/loop.py:60 train_loop > train/data/loader.py:61 next")
    assert_in_order(timeout, "  step 120", "600 s on rank 0 of 4", "run.timeouts.step_s=600", "raise")


def test_one_odd_rank_is_found_among_any_number() -> None:
    for world_size, odd, strange in product(
        (1, 2, 8, 1000), (0, 1, 7, 999), (LOADS, GATHERS, replace(WAITS, silent_s=30.0))
    ):
        reports = ranks(*[strange if rank == odd % world_size else WAITS for rank in range(world_size)])
        message = diagnose(reports, FIRED)
        if world_size > 2 or strange != GATHERS:  # of two ranks in different collectives none is the odd one
            assert message.splitlines()[1].startswith(f"  rank {odd % world_size}: "), message
        assert len(message.splitlines()) <= 6
        assert len(message) < 1500


def test_a_thousand_ranks_at_a_thousand_places_fit_on_a_screen() -> None:
    places = [
        replace(WAITS, place=f"train/step.py:{rank} train_step", collectives=(("mesh", rank),))
        for rank in range(1000)
    ]
    steps = [replace(WAITS, step=rank, silent_s=rank % 7 * 20.0) for rank in range(1000)]
    for reports in (places, steps, [replace(LOADS, place=report.place) for report in places]):
        message = diagnose(ranks(*reports), FIRED)
        assert len(message.splitlines()) < 20
        assert len(message) < 4000


# Where a thread is


STEP = FrameSummary(str(stack_traces.PACKAGE / "train/step.py"), 70, "train_step")
LOOP = FrameSummary(str(stack_traces.PACKAGE / "train/loop.py"), 60, "train_loop")
C10D, WRAPPER = (
    str(TORCH / "distributed/distributed_c10d.py"),
    FrameSummary(str(TORCH / "distributed/c10d_logger.py"), 83, "wrapper"),
)
FSDP = FrameSummary(
    str(TORCH / "distributed/fsdp/_fully_shard/_fsdp_param_group.py"), 300, "wait_for_unshard"
)
SAVING = FrameSummary(str(TORCH / "distributed/checkpoint/filesystem.py"), 5, "write")
AUTOGRAD = FrameSummary(str(TORCH / "autograd/graph.py"), 800, "_engine_run_backward")


@pytest.mark.parametrize(
    ("inner", "waits_in"),
    [
        ([FrameSummary(C10D, 3252, "all_reduce"), WRAPPER], "all_reduce"),
        (
            [FrameSummary(C10D, 40, "all_gather"), FrameSummary(C10D, 30, "all_gather_object"), WRAPPER],
            "all_gather_object",
        ),
        (
            [FrameSummary(C10D, 9, "all_gather_into_tensor"), WRAPPER, FSDP, AUTOGRAD],
            "all_gather_into_tensor",
        ),
        ([FSDP, AUTOGRAD], "wait_for_unshard"),
        ([AUTOGRAD], ""),
        ([SAVING], ""),
        ([], ""),
    ],
)
def test_the_collective_that_our_code_called_is_found(inner: list[FrameSummary], waits_in: str) -> None:
    where = find_where([*inner, STEP, LOOP])
    assert (where.place, where.waits_in) == ("train/step.py:70 train_step", waits_in)
    if inner:
        file, line, name = inner[0].filename, inner[0].lineno, inner[0].name
        assert where.inside == f"{Path(file).relative_to(TORCH.parent)}:{line} {name}"
    assert where.path == ("train/loop.py:60 train_loop", "train/step.py:70 train_step")
    assert find_where([LOOP, *inner, STEP]).waits_in == "", "torch.distributed has called our code"


def test_ours_is_the_package_wherever_it_lies_and_what_stands_beside_it_in_a_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shown(file: Path) -> str:
        return find_where([FrameSummary(str(file), 7, "f")]).place

    # `python -m train.main` runs the file itself; everything else imports it through the package's link
    assert shown(stack_traces.ROOT / "train/main.py") == "train/main.py:7 f"
    assert shown(stack_traces.ROOT / ".venv/lib/python3.11/site-packages/a/b.py") == ""
    installed = Path("/opt/lib/python3.11/site-packages")
    monkeypatch.setattr(stack_traces, "ROOT", installed)
    monkeypatch.setattr(stack_traces, "PACKAGE", installed / "meshwright")
    assert shown(installed / "meshwright/train/step.py") == "train/step.py:7 f"
    assert shown(installed / "another/step.py") == ""


def test_a_bare_wait_is_seen_in_the_source(tmp_path: Path) -> None:
    source = tmp_path / "graph.py"
    source.write_text("x = 1\nbuffer = torch.ops._c10d_functional.wait_tensor.default(buffer)\nwork.wait()\n")
    calls = [FrameSummary(str(source), line, "call") for line in (1, 2, 3)]
    assert [find_where([call, STEP]).waits_in for call in calls] == ["", "wait", "wait"]
    assert find_where([]).place == ""
