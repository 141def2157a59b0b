"""SIGKILL at random moments; tests/soak/kills.py repeats it for hours."""

import argparse
import os

import pytest

from tests.soak.kills import measure_kills
from tests.support.launch import TORCHRUN_GRACE_S


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_seven_kills_one_of_them_with_tensor_parallelism() -> None:
    seed = os.environ["MESHWRIGHT_TESTS_SEED"]
    options = argparse.Namespace(training=4, saving=3, asynchronous="both", seed=seed, processes=2, steps=20)
    config, figures = measure_kills(options, ["--train.global_batch_size=4"])
    assert config["checkpoint"]["every"] == 2
    assert figures["all_right"], (seed, figures)
    assert figures["kills"] == figures["resumed_at_last_commit_plus_1"] == 7
    assert (figures["damaged_checkpoints"], figures["wrong_steps"]) == (0, 0)
    assert [row["mesh"] for row in figures["rows"]].count("FSDP x TP") == 1
    assert {row["asynchronous"] for row in figures["rows"]} == {False, True}
    late = [row for row in figures["rows"] if row["ended_s"] >= TORCHRUN_GRACE_S]
    # After about one kill in a hundred a rank hangs until it is killed too
    # (tests/soak/records/2026-11-21-kills.json has two of 100): a known fault without a known cause, which
    # must not become more frequent.
    assert len(late) <= 1, (seed, late)
