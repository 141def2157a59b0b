"""The message of a stuck job: made out of what every rank says, and where a thread is."""

import math
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary

import pytest

from meshwright.train.fault_tolerance import stack_traces
from meshwright.train.fault_tolerance.hang_diagnosis import (
    RankReport,
    TimedOut,
    as_ranges,
    diagnose,
    diagnose_alone,
)
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


@pytest.mark.parametrize(
    ("reports", "headline"),
    [
        (
            ranks(WAITS, WAITS, LOADS, WAITS),
            "rank 2 is at train/data/loader.py:61 next, while ranks 0-1, 3 wait in all_reduce "
            "(train/step.py:70 train_step)",
        ),
        (
            ranks(WAITS, LOADS, LOADS, WAITS),
            "ranks 1-2 are at train/data/loader.py:61 next, while ranks 0, 3 wait in all_reduce "
            "(train/step.py:70 train_step)",
        ),
        (
            ranks(WAITS, replace(LOADS, step=119)),
            "rank 1 is behind, in step 119, at train/data/loader.py:61 next, while rank 0 waits in "
            "all_reduce (train/step.py:70 train_step)",
        ),
        (
            ranks(WAITS, replace(LOADS, section="evaluation")),
            "rank 1 is ahead, in evaluation at step 120, at train/data/loader.py:61 next, while rank 0 waits "
            "in all_reduce (train/step.py:70 train_step)",
        ),
        (
            ranks(WAITS, replace(LOADS, section="first step")),
            "rank 1 is behind, in first step (120), at train/data/loader.py:61 next, while rank 0 waits in "
            "all_reduce (train/step.py:70 train_step)",
        ),
        (
            ranks(WAITS, WAITS, WAITS, GATHERS),
            "a desynchronised collective: all_reduce called from train/step.py:70 train_step by ranks 0-2, "
            "all_gather_object called from train/metrics/collector.py:88 log by rank 3",
        ),
        (
            ranks(WAITS, replace(WAITS, place="train/step.py:71 train_step")),
            "a desynchronised collective: all_reduce called from train/step.py:70 train_step by rank 0, "
            "all_reduce called from train/step.py:71 train_step by rank 1",
        ),
        (
            ranks(WAITS, replace(WAITS, step=119)),
            "a desynchronised collective: all wait in all_reduce (train/step.py:70 train_step), but rank 1 "
            "in step 119, the others further on",
        ),
        (
            ranks(WAITS, WAITS),
            "all 2 ranks wait in the same all_reduce (train/step.py:70 train_step), which does not end: look "
            "at the network",
        ),
        (
            ranks(WAITS, replace(WAITS, silent_s=42.0), LOADS),
            "rank 1 gives no answer, and no heartbeat for about 42 s: process stopped or killed, or "
            "machine gone",
        ),
        (
            ranks(replace(WAITS, silent_s=42.0), replace(WAITS, silent_s=44.0), LOADS),
            "ranks 0-1 give no answer, and no heartbeat for about 42 s or more: processes stopped or killed, "
            "or machine gone",
        ),
        (ranks(WAITS, RankReport(1, "set-up", silent_s=math.inf)), "rank 1 never gave a heartbeat"),
        (
            ranks(RankReport(0, "ended", 119), WAITS),
            "rank 0 has ended, while the others go on: they disagree on the last step",
        ),
        (ranks(LOADS), "rank 0 is at train/data/loader.py:61 next"),
        (ranks(WAITS), "rank 0 waits in all_reduce (train/step.py:70 train_step)"),
        (ranks(LOADS, LOADS), "all 2 ranks are at train/data/loader.py:61 next, none is behind"),
        (
            ranks(LOADS, replace(LOADS, step=119)),
            "rank 1 is behind the others, in step 119 at train/data/loader.py:61 next",
        ),
        (
            ranks(LOADS, LOADS, replace(LOADS, place="train/metrics/collector.py:9 log")),
            "rank 2 is elsewhere than the others, at train/metrics/collector.py:9 log",
        ),
        (
            ranks(LOADS, replace(LOADS, place="train/metrics/collector.py:9 log")),
            "the ranks are at different places, and none stands out",
        ),
        (
            ranks(WAITS, replace(LOADS, place="", inside="threading.py:9 wait")),
            "rank 1 is at threading.py:9 wait, while rank 0 waits in all_reduce (train/step.py:70 "
            "train_step)",
        ),
    ],
)
def test_the_headline_names_who_is_to_blame_and_why(reports: list[RankReport], headline: str) -> None:
    message = diagnose(reports, FIRED)
    assert message.splitlines()[0] == f"STUCK: {headline}"
    assert diagnose(reports[::-1], FIRED) == message  # whatever order they come in


def test_the_whole_message() -> None:
    loads = replace(
        LOADS,
        inside="queue.py:171 get",
        path=("train/loop.py:60 train_loop", "train/data/loader.py:61 next"),
        collectives=(("mesh_tp of ranks 0-3", 1204),),
    )
    waits = replace(WAITS, collectives=(("mesh_tp of ranks 0-3", 1205),))
    assert diagnose(ranks(waits, waits, loads, waits), FIRED) == (
        "STUCK: rank 2 is at train/data/loader.py:61 next, while ranks 0-1, 3 wait in all_reduce "
        "(train/step.py:70 train_step)\n"
        "  rank 2: step 120 for 600 s, at train/data/loader.py:61 next (in queue.py:171 get)\n"
        "  ranks 0-1, 3: step 120 for 600 s, in all_reduce called from train/step.py:70 train_step\n"
        "  collectives begun in mesh_tp of ranks 0-3: 1,204 by rank 2; 1,205 by ranks 0-1, 3\n"
        "  how rank 2 came there: train/loop.py:60 train_loop > train/data/loader.py:61 next\n"
        "  step 120 has taken 600 s on rank 0 of 4, more than run.timeouts.step_s=600: raise that if it is "
        "only slow"
    )


@pytest.mark.parametrize("world_size", [1, 2, 8, 64, 1000])
@pytest.mark.parametrize("odd", [0, 1, 7, 999])
def test_one_odd_rank_is_found_among_any_number(world_size: int, odd: int) -> None:
    odd %= world_size
    for strange in (LOADS, GATHERS, replace(WAITS, silent_s=30.0)):
        reports = ranks(*[strange if rank == odd else WAITS for rank in range(world_size)])
        message = diagnose(reports, FIRED)
        if world_size > 2 or strange != GATHERS:  # of two ranks in different collectives none is the odd one
            assert message.splitlines()[1].startswith(f"  rank {odd}: "), message
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


def test_half_of_the_ranks_silent_are_one_line_and_the_others_another() -> None:
    reports = ranks(
        *[replace(WAITS, silent_s=60 + rank / 1000) if rank >= 500 else WAITS for rank in range(1000)]
    )
    assert diagnose(reports, FIRED).splitlines()[:3] == [
        "STUCK: ranks 500-999 give no answer, and no heartbeat for about 60 s or more: processes stopped or "
        "killed, or machine gone",
        "  ranks 500-999: step 120, last heartbeat about 60 s ago",
        "  ranks 0-499: step 120 for 600 s, in all_reduce called from train/step.py:70 train_step",
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([2, 0, 1, 5], "0-2, 5"),
        ([7, 7], "7"),
        (range(1000), "0-999"),
        (range(0, 1000, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ... (500 in all)"),
    ],
)
def test_ranks_are_ranges(numbers: list[int], text: str) -> None:
    assert as_ranges(numbers) == text


def test_a_rank_that_speaks_for_itself() -> None:
    assert diagnose_alone(replace(WAITS, rank=2), 4, None, "rank 0 is gone") == (
        "STUCK: rank 2 of 4 can only speak for itself: rank 0 is gone\n"
        "  rank 2: step 120 for 600 s, in all_reduce called from train/step.py:70 train_step\n"
        "  how it came there: a > b\n"
        "  another rank's section has outlasted its time-out"
    )


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
    ("inner", "waits_in", "inside"),
    [
        (
            [FrameSummary(C10D, 3252, "all_reduce"), WRAPPER],
            "all_reduce",
            "torch/distributed/distributed_c10d.py:3252 all_reduce",
        ),
        (
            [
                FrameSummary(C10D, 4000, "all_gather"),
                WRAPPER,
                FrameSummary(C10D, 3000, "all_gather_object"),
                WRAPPER,
            ],
            "all_gather_object",
            "torch/distributed/distributed_c10d.py:4000 all_gather",
        ),
        (
            [FrameSummary(C10D, 9, "all_gather_into_tensor"), WRAPPER, FSDP, AUTOGRAD],
            "all_gather_into_tensor",
            "torch/distributed/distributed_c10d.py:9 all_gather_into_tensor",
        ),
        (
            [FSDP, AUTOGRAD],
            "wait_for_unshard",
            "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:300 wait_for_unshard",
        ),
        ([AUTOGRAD], "", "torch/autograd/graph.py:800 _engine_run_backward"),
        ([SAVING], "", "torch/distributed/checkpoint/filesystem.py:5 write"),
        ([], "", ""),
    ],
)
def test_the_collective_that_our_code_called_is_found(
    inner: list[FrameSummary], waits_in: str, inside: str
) -> None:
    where = find_where([*inner, STEP, LOOP])
    assert (where.place, where.waits_in, where.inside) == ("train/step.py:70 train_step", waits_in, inside)
    assert where.path == ("train/loop.py:60 train_loop", "train/step.py:70 train_step")


def test_ours_is_the_package_wherever_it_lies_and_what_stands_beside_it_in_a_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shown(file: Path) -> str:
        return find_where([FrameSummary(str(file), 7, "f")]).place

    # `python -m train.main` runs the file itself, which everything else sees through the package's link
    assert shown(stack_traces.ROOT / "train/main.py") == "train/main.py:7 f"
    assert shown(stack_traces.ROOT / ".venv/lib/python3.11/site-packages/a/b.py") == ""
    installed = Path("/opt/lib/python3.11/site-packages")
    monkeypatch.setattr(stack_traces, "ROOT", installed)
    monkeypatch.setattr(stack_traces, "PACKAGE", installed / "meshwright")
    assert shown(installed / "meshwright/train/step.py") == "train/step.py:7 f"
    assert shown(installed / "another/step.py") == ""


def test_code_of_ours_that_torch_distributed_called_waits_for_nothing() -> None:
    assert find_where([LOOP, FSDP, STEP]).waits_in == ""


def test_a_bare_wait_is_seen_in_the_source(tmp_path: Path) -> None:
    source = tmp_path / "graph.py"
    source.write_text("x = 1\nbuffer = torch.ops._c10d_functional.wait_tensor.default(buffer)\nwork.wait()\n")
    calls = [FrameSummary(str(source), line, "call") for line in (1, 2, 3)]
    assert [find_where([call, STEP]).waits_in for call in calls] == ["", "wait", "wait"]
    assert find_where([]).place == ""
