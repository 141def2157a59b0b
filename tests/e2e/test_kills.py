"""SIGKILL at random moments, and the programs of tests/soak that repeat it for hours."""

import argparse
import dataclasses
import json
import os

import pytest

from tests.soak.killed_run import Joined, Kill
from tests.soak.kills import kills_text, measure_kills, summarise
from tests.support.launch import EAGER, TINY, TORCHRUN_GRACE_S
from tests.support.nested import run_nested

GOOD = Kill(
    "FSDP",
    "saving",
    True,
    rank=1,
    at_step=5,
    in_save=True,
    half_written=False,
    ended_s=0.5,
    damaged=(),
    committed=4,
    resumed_from=4,
    first_step=5,
)
BAD = {
    "it started from the beginning": (dataclasses.replace(GOOD, resumed_from=0, first_step=1), 0),
    "it left a step out": (dataclasses.replace(GOOD, first_step=6), 0),
    "a checkpoint is damaged": (dataclasses.replace(GOOD, damaged=("step-00000004",)), 0),
    "a step had another loss": (GOOD, 1),
}


@pytest.mark.slow
@pytest.mark.sampled(5)
def test_seven_kills_one_of_them_with_tensor_parallelism() -> None:
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    options = argparse.Namespace(training=4, saving=3, asynchronous="both", seed=seed, processes=2, steps=20)
    config, figures, text = measure_kills(options, ["--train.global_batch_size=4"])
    assert config["checkpoint"]["every"] == 2
    assert figures["all_right"], (seed, text, figures["rows"])
    assert figures["kills"] == figures["resumed_at_last_commit_plus_1"] == 7
    assert (figures["damaged_checkpoints"], figures["wrong_steps"]) == (0, 0)
    assert [row["mesh"] for row in figures["rows"]].count("FSDP x TP") == 1
    assert {row["asynchronous"] for row in figures["rows"]} == {False, True}
    late = [row for row in figures["rows"] if row["ended_s"] >= TORCHRUN_GRACE_S]
    # After about one kill in a hundred a rank hangs until it is killed too
    # (tests/soak/records/2026-11-21-kills.json has two of 100): a known fault without a known cause, which
    # must not become more frequent.
    assert len(late) <= 1, (seed, late)


def test_what_a_kill_has_lost_is_said() -> None:
    right = summarise([Joined((GOOD, GOOD), 40, 0), Joined((GOOD,), 40, 0)])
    assert (right["all_right"], right["kills"], right["steps_compared"], right["in_save"]) == (True, 3, 80, 3)
    assert kills_text(right).endswith("nothing was lost")
    wrong = {fault: summarise([Joined((GOOD, kill), 40, steps)]) for fault, (kill, steps) in BAD.items()}
    assert [fault for fault, figures in wrong.items() if figures["all_right"]] == []
    assert not any(kills_text(figures).endswith("nothing was lost") for figures in wrong.values())


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_what_safety_costs_is_measured() -> None:
    done = run_nested("tests.soak.safety", "--rounds=1", "--json", *TINY, *EAGER)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["command"][:4] == ["python", "-m", "tests.soak.safety", "--rounds=1"]
    figures = document["figures"]
    assert figures["save_ratio_to"].keys() == {"safetensors", "plain"}
    assert figures["step_ratio"].keys() == {"saving", "beside writing"}
    assert all(seconds > 0 for ways in figures["load_s"].values() for seconds in ways.values())
