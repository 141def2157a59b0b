"""The message of a hang, made from the reports of all ranks, and the position of a thread."""

import math
import os
import random
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary

import pytest

from meshwright.train.fault_tolerance import hang_diagnosis
from meshwright.train.fault_tolerance.hang_diagnosis import TORCH, RankReport, TimedOut, diagnose, find_where

# The message

DRAW = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"])
STEP_70, NEXT_61 = "train/step.py:70 train_step", "train/data/loader.py:61 next"
WAITS = RankReport(0, "step", 120, 600.0, place=STEP_70, waits_in="all_reduce")
FIRED = TimedOut(replace(WAITS, in_section_s=600.4), 4, "step_s", 600.0)
LOADS = replace(WAITS, place=NEXT_61, waits_in="")
GATHERS = replace(WAITS, place="train/metrics/collector.py:88 log", waits_in="all_gather_object")
SILENT = replace(WAITS, silent_s=42.0)
ODD_RANK = {  # the report of all ranks but one, that rank's, and what the headline says of it
    "asleep": (WAITS, LOADS, "in no collective, while the others wait"),
    "in a library": (WAITS, replace(LOADS, place="", inside="threading.py:9 wait"), "in no collective"),
    "behind": (WAITS, replace(LOADS, step=119), "in no collective"),
    "first step": (WAITS, replace(LOADS, section="first step"), "in no collective"),
    "another collective": (WAITS, GATHERS, "desynchronized collectives, not where most ranks are"),
    "an earlier collective": (WAITS, replace(WAITS, step=119), "behind the others"),
    "silent": (WAITS, SILENT, "no answer"),
    "never came": (WAITS, RankReport(0, "set-up", silent_s=math.inf), "no answer"),
    "ended": (WAITS, RankReport(0, "ended", 119), "ended, but the others go on"),
    "behind on a GPU": (LOADS, replace(LOADS, step=119), "behind the others"),
    "elsewhere on a GPU": (LOADS, replace(LOADS, place=STEP_70), "not where most ranks are"),
}
NO_ODD_RANK = {
    (WAITS, WAITS): "all ranks are in the same collective, which does not complete",
    (WAITS, GATHERS): "desynchronized collectives",
    (LOADS, LOADS): "all ranks are at the same place",
    (LOADS, replace(LOADS, place=STEP_70)): "the ranks are at different places",
    (WAITS,): "all ranks are in the same collective",
}


def diagnosed(*reports: RankReport) -> tuple[str, list[str]]:
    """The headline and the other lines of the message, which is the same in any order of the reports."""
    of_ranks = [replace(report, rank=rank) for rank, report in enumerate(reports)]
    message = diagnose(of_ranks, FIRED)
    assert diagnose(DRAW.sample(of_ranks, len(of_ranks)), FIRED) == message
    assert message.startswith("STUCK: ")
    headline, *lines = message.splitlines()
    return headline, lines


@pytest.mark.parametrize("odd", ODD_RANK)
def test_one_odd_rank_is_named_among_any_number(odd: str) -> None:
    usual, report, said = ODD_RANK[odd]
    for world_size in (3, 8, DRAW.randrange(3, 1000)):
        rank = DRAW.randrange(world_size)
        headline, lines = diagnosed(*(report if other == rank else usual for other in range(world_size)))
        assert headline.startswith(f"STUCK: rank {rank}: {said}")
        assert lines[0].startswith(f"  rank {rank}: ")
        assert len(lines) <= 5


def test_without_an_odd_rank_none_is_blamed_and_a_silent_one_is_before_a_busy_one() -> None:
    for reports, said in NO_ODD_RANK.items():
        assert said in diagnosed(*reports)[0]
    assert diagnosed(WAITS, SILENT, LOADS)[0].startswith("STUCK: rank 1: no answer")
    assert diagnosed(WAITS, LOADS, LOADS, WAITS)[0].startswith("STUCK: ranks 1-2: in no collective")


def test_the_lines_below_have_every_rank_and_the_timeout() -> None:
    loads = replace(LOADS, inside="queue.py:171 get")
    _, (of_2, of_others, timeout) = diagnosed(WAITS, WAITS, loads, WAITS)
    assert of_2 == f"  rank 2: step 120 for 600 s, at {NEXT_61} (in queue.py:171 get)"
    assert of_others == f"  ranks 0-1, 3: step 120 for 600 s, in all_reduce called from {STEP_70}"
    assert timeout.startswith("  step 120 has taken 600 s on rank 0 of 4, more than run.timeouts.step_s=600")


def test_a_thousand_ranks_at_a_thousand_places_fit_on_a_screen() -> None:
    places = [replace(WAITS, place=f"train/step.py:{n} f") for n in range(1000)]
    steps = [replace(WAITS, step=n, silent_s=n % 7 * 20.0) for n in range(1000)]
    for reports in (places, steps, [replace(LOADS, place=report.place) for report in places]):
        headline, lines = diagnosed(*reports)
        assert len(lines) < 19
        assert len(headline) + sum(map(len, lines)) < 4000


# Where a thread is


def torch_frame(file: str, name: str) -> FrameSummary:
    return FrameSummary(str(TORCH / file), 9, name)


STEP = FrameSummary(str(hang_diagnosis.PACKAGE / "train/step.py"), 70, "train_step")
LOOP = FrameSummary(str(hang_diagnosis.PACKAGE / "train/loop.py"), 60, "train_loop")
C10D, AUTOGRAD = "distributed/distributed_c10d.py", torch_frame("autograd/graph.py", "_engine_run_backward")
WRAPPER = torch_frame("distributed/c10d_logger.py", "wrapper")
FSDP = torch_frame("distributed/fsdp/_fully_shard/_fsdp_param_group.py", "wait_for_unshard")
INNER = {
    "all_reduce": [torch_frame(C10D, "all_reduce"), WRAPPER],
    "all_gather_object": [torch_frame(C10D, "all_gather"), torch_frame(C10D, "all_gather_object"), WRAPPER],
    "all_gather_into_tensor": [torch_frame(C10D, "all_gather_into_tensor"), WRAPPER, FSDP, AUTOGRAD],
    "wait_for_unshard": [FSDP, AUTOGRAD],
    "": [torch_frame("distributed/checkpoint/filesystem.py", "write")],
}


@pytest.mark.parametrize("waits_in", INNER)
def test_the_collective_that_our_code_called_is_found(waits_in: str) -> None:
    inner = INNER[waits_in]
    where = find_where([*inner, STEP, LOOP])
    assert (where.place, where.waits_in) == (STEP_70, waits_in)
    assert where.inside == f"{Path(inner[0].filename).relative_to(TORCH.parent)}:9 {inner[0].name}"
    assert find_where([LOOP, *inner, STEP]).waits_in == "", "torch.distributed has called our code"


def test_ours_is_the_package_wherever_it_lies_and_a_bare_wait_is_seen_in_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(file: Path) -> str:
        return find_where([FrameSummary(str(file), 7, "f")]).place

    # `python -m train.main` runs the file itself; everything else imports it through the package's link
    assert shown(hang_diagnosis.ROOT / "train/main.py") == "train/main.py:7 f"
    assert shown(hang_diagnosis.ROOT / ".venv/lib/python3.11/site-packages/a/b.py") == ""
    source = tmp_path / "graph.py"
    source.write_text("x = 1\nbuffer = torch.ops._c10d_functional.wait_tensor.default(buffer)\nwork.wait()\n")
    calls = [FrameSummary(str(source), line, "call") for line in (1, 2, 3)]
    assert [find_where([call, STEP]).waits_in for call in calls] == ["", "wait", "wait"]
    installed = Path("/opt/lib/python3.11/site-packages")
    monkeypatch.setattr(hang_diagnosis, "ROOT", installed)
    monkeypatch.setattr(hang_diagnosis, "PACKAGE", installed / "meshwright")
    assert shown(installed / "meshwright/train/step.py") == "train/step.py:7 f"
    assert shown(installed / "another/step.py") == ""
