"""SIGKILL at random moments, and the programs of tests/soak that do it for hours."""

import argparse
import dataclasses
import json
import random

import pytest

from tests.e2e.faults import LIMIT_S
from tests.soak.killed_run import Joined, Kill, Mesh, Wanted
from tests.soak.kills import deal, kills_text, make_wanted, measure_kills, summarise
from tests.support.launch import EAGER, TINY
from tests.support.nested import run_nested

GOOD = Kill("FSDP", "saving", True, rank=1, at_step=5, in_save=True, half_written=False, ended_s=0.5, damaged=(), committed=4,
            resumed_from=4, first_step=5)  # fmt: skip
BAD = {
    "it started from the beginning": (dataclasses.replace(GOOD, resumed_from=0, first_step=1), 0),
    "it left a step out": (dataclasses.replace(GOOD, first_step=6), 0),
    "a checkpoint is damaged": (dataclasses.replace(GOOD, damaged=("step-00000004",)), 0),
    "a step had another loss": (GOOD, 1),
}


@pytest.mark.slow
def test_seven_kills_one_of_them_with_tensor_parallelism() -> None:
    seed = random.randrange(1000)
    options = argparse.Namespace(training=4, saving=3, asynchronous="both", seed=seed, processes=2, steps=20)
    config, figures, text = measure_kills(options, ["--train.global_batch_size=4"])
    assert config["checkpoint"]["every"] == 2
    assert figures["all_right"], (seed, text, figures["rows"])
    assert figures["kills"] == figures["resumed_at_last_commit_plus_1"] == 7
    assert (figures["damaged_checkpoints"], figures["wrong_steps"]) == (0, 0)
    assert [row["mesh"] for row in figures["rows"]].count("FSDP x TP") == 1
    assert {row["asynchronous"] for row in figures["rows"]} == {False, True}
    assert figures["ended_s"]["worst"] < LIMIT_S / 2, "no rank waits for one that is gone until a time-out ends it"


def test_every_kill_that_was_asked_for_is_dealt_once_and_what_is_wrong_is_said() -> None:
    wanted = make_wanted(50, 50, (False, True), random.Random(0))
    assert {(way, phase): wanted.count(Wanted(phase, way)) for phase in ("training", "saving") for way in (False, True)} == {
        (False, "training"): 25, (True, "training"): 25, (False, "saving"): 25, (True, "saving"): 25}  # fmt: skip
    assert {mesh.name: len(ones) for mesh, ones in deal(wanted, 2).items()} == {"FSDP": 80, "FSDP x TP": 20}
    assert deal(wanted[:4], 2) == {Mesh("FSDP", 2): wanted[:4]}
    right = summarise([Joined((GOOD, GOOD), 40, 0), Joined((GOOD,), 40, 0)])
    assert (right["all_right"], right["kills"], right["steps_compared"], right["in_save"]) == (True, 3, 80, 3)
    assert kills_text(right).endswith("nothing was lost")
    wrong = {what: summarise([Joined((GOOD, kill), 40, steps)]) for what, (kill, steps) in BAD.items()}
    assert [what for what, figures in wrong.items() if figures["all_right"]] == []
    assert all(kills_text(figures).endswith("NOT as it should be") for figures in wrong.values())


@pytest.mark.slow
def test_what_safety_costs_is_measured() -> None:
    done = run_nested("tests.soak.safety", "--rounds=1", "--json", *TINY, *EAGER)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["command"][:4] == ["python", "-m", "tests.soak.safety", "--rounds=1"]
    figures = document["figures"]
    assert figures["save_ratio_to"].keys() == {"safetensors", "plain"}
    assert figures["step_ratio"].keys() == {"saving", "beside writing"}
    assert all(seconds > 0 for ways in figures["load_s"].values() for seconds in ways.values())
