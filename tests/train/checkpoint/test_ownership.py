"""Which starts go on with the training in a folder, and which count as restarts by the same torchrun."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.train.checkpoint.resume import Start, admit, judge
from meshwright.train.checkpoint.training_record import FILE
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import CheckpointError

ALONE = RankInfo(0, 1, 0, 1, False)


def test_a_restart_is_of_the_launch_that_was_admitted_last(group: None, tmp_path: Path) -> None:
    config, launched = parse_config([]), replace(ALONE, launch="torchrun 1")
    for ranks, restarted in (
        (ALONE, False),
        (ALONE, False),
        (launched, False),
        (launched, True),
        (ALONE, False),
    ):
        admission = judge(config, tmp_path, ranks)
        assert (admission.restarted, admission.goes_on, admission.resume) == (restarted, False, "auto")
        assert judge(config, tmp_path, ranks) == admission, "a start that is not admitted changes nothing"
        assert admit(config, tmp_path, ranks, admission, Start()) == []
    (tmp_path / FILE).write_text("{}")
    assert not judge(config, tmp_path, launched).restarted, "a file that cannot be read is none"
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    (warning,) = admit(config, tmp_path, ALONE, admission, Start())
    assert f"{tmp_path / FILE} cannot be written (Is a directory)" in warning


def test_only_the_command_that_began_it_goes_on_beside_auto(group: None, tmp_path: Path) -> None:
    began = parse_config(["--checkpoint.resume=none", "--run.seed=1"])
    admit(began, tmp_path, ALONE, judge(began, tmp_path, ALONE), Start())
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    for keys in (["--checkpoint.resume=none", "--run.seed=1", "--train.steps=9"], ["--run.seed=7"]):
        assert judge(parse_config(keys), tmp_path, ALONE).resume == "auto"
    back = f"--checkpoint.resume={tmp_path}/checkpoints/step-"
    assert not judge(parse_config([f"{back}00000002"]), tmp_path, ALONE).goes_on
    others = ["--checkpoint.resume=none", f"--checkpoint.resume={tmp_path}/other", f"{back}00000001"]
    for resume in others:
        with pytest.raises(CheckpointError, match=r"contains .*step-00000002, .*another run\.dir"):
            judge(parse_config([resume]), tmp_path, ALONE)
