"""Which starts count as restarts of a training by the same torchrun."""

from dataclasses import replace
from pathlib import Path

from meshwright.train.checkpoint.load import Start
from meshwright.train.checkpoint.ownership import FILE, admit, judge
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.ranks import RankInfo

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
