"""The benchmarks of faults without their processes: how kills are dealt out, and what figures say of kills that went wrong."""

import argparse
import dataclasses
import random

import pytest

from tools.bench import kills, safety
from tools.bench.__main__ import make_parser
from tools.bench.killed_run import Joined, Kill, Mesh, Wanted
from tools.bench.kills import deal, kills_text, make_wanted, summarise

GOOD = Kill("FSDP", "saving", True, rank=1, at_step=5, in_save=True, half_written=False, ended_s=0.5, damaged=(), committed=4,
            resumed_from=4, first_step=5)  # fmt: skip


def test_every_kill_that_was_asked_for_is_dealt_once_and_a_fifth_meets_tensor_parallelism() -> None:
    wanted = make_wanted(50, 50, (False, True), random.Random(0))
    assert sum(one.phase == "training" for one in wanted) == 50
    assert {way: wanted.count(Wanted("saving", way)) for way in (False, True)} == {False: 25, True: 25}
    assert wanted != make_wanted(50, 50, (False, True), random.Random(1))
    todo = deal(wanted, 2)
    assert {(mesh.name, mesh.processes): len(ones) for mesh, ones in todo.items()} == {("FSDP", 2): 80, ("FSDP x TP", 4): 20}
    assert deal(wanted[:4], 2) == {Mesh("FSDP", 2): wanted[:4]}


def test_figures_of_kills_that_nothing_was_lost_by() -> None:
    figures = summarise([Joined((GOOD, dataclasses.replace(GOOD, ended_s=1.5)), 40, 0), Joined((GOOD,), 40, 0)])
    assert figures["all_right"]
    assert (figures["kills"], figures["runs"], figures["steps_compared"], figures["in_save"]) == (3, 2, 80, 3)
    assert figures["ended_s"] == {"median": 0.5, "worst": 1.5}
    assert figures["by_kind"] == {"FSDP, saving, asynchronous": 3}
    assert kills_text(figures).endswith("nothing was lost")


@pytest.mark.parametrize(("kill", "wrong_steps"), [
    (dataclasses.replace(GOOD, resumed_from=0, first_step=1), 0),
    (dataclasses.replace(GOOD, first_step=6), 0),
    (dataclasses.replace(GOOD, damaged=("step-00000004",)), 0),
    (GOOD, 1),
], ids=["started from the beginning", "left a step out", "damaged", "another loss"])  # fmt: skip
def test_one_thing_that_is_not_right_is_said(kill: Kill, wrong_steps: int) -> None:
    figures = summarise([Joined((GOOD, kill), 40, wrong_steps)])
    assert not figures["all_right"]
    assert kills_text(figures).endswith("NOT as it should be")


def test_both_have_a_command() -> None:
    parser = make_parser()
    options = parser.parse_args(["kills", "--training", "3", "--saving", "0", "--asynchronous", "true"])
    assert (options.training, options.saving, options.asynchronous, options.seed, options.processes) == (3, 0, "true", 0, 2)
    assert isinstance(parser.parse_args(["safety"]), argparse.Namespace)
    assert kills.SUMMARY in parser.format_help()
    assert safety.SUMMARY in parser.format_help()


def test_the_ratio_of_saves_is_taken_within_each_round_and_decides() -> None:
    saves_s = {"ours": [1.0, 4.0], "safetensors": [1.0, 3.2], "plain": [2.0, 8.0]}
    disk = {"size_gb": 0.4, "hash_gb_s": {"sha256": 1.0}, "save_s": saves_s, "load_s": {"warm": {"plain": [1.0]}},
            "asynchronous_s": {"stall": [0.1]}}  # fmt: skip
    stall = {"size_gb": 0.03, "committed_s": 0.2, "step_s": {"normal": [1.0, 1.0], "saving": [1.2], "beside writing": [1.1]}}
    figures = {"processes": 2, "rounds": 2, **safety.summarise(disk, stall)}
    assert figures["save_ratio_to"] == pytest.approx({"safetensors": 1.125, "plain": 0.5})
    assert figures["step_ratio"] == {"saving": 1.2, "beside writing": 1.1}
    assert safety.safety_text(figures).endswith(": within")
    for way in ("safetensors", "plain"):
        slow = {**disk, "save_s": {**saves_s, way: [0.5, 2.0]}}
        assert safety.safety_text({**figures, **safety.summarise(slow, stall)}).endswith("NOT within")
    stall["step_s"]["saving"] = [1.6]
    assert safety.safety_text({**figures, **safety.summarise(disk, stall)}).endswith("NOT within")
