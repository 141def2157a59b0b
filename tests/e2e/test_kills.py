"""SIGKILL at random moments: `tools.bench kills` with a few kills, on real processes."""

import argparse

import pytest

from tools.bench.kills import measure_kills


def kill(training: int, saving: int, seed: int) -> dict:
    options = argparse.Namespace(training=training, saving=saving, asynchronous="both", seed=seed, processes=2, steps=40)
    config, figures, text = measure_kills(options, [])
    assert config["checkpoint"]["every"] == 2
    assert figures["all_right"], (text, figures["rows"])
    assert figures["kills"] == figures["resumed_at_last_commit_plus_1"] == training + saving
    assert (figures["damaged_checkpoints"], figures["wrong_steps"]) == (0, 0)
    assert figures["ended_s"]["worst"] < 60, "the others ended by themselves, or were ended by torchrun after its 30 s"
    return figures


@pytest.mark.slow
def test_ten_kills_two_of_them_with_tensor_parallelism() -> None:
    figures = kill(5, 5, seed=1)
    assert [row["mesh"] for row in figures["rows"]].count("FSDP x TP") == 2
    assert {row["asynchronous"] for row in figures["rows"]} == {False, True}
