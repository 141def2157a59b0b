"""tools.calibrate: its options, and a real calibration whose file the planner reads."""

import json
from pathlib import Path

import pytest

from meshwright.parallel.planner.hardware import ALL_TO_ALL, COLLECTIVES, load_hardware, read_hardware
from meshwright.tools import calibrate
from meshwright.tools.calibrate import find_base, main
from meshwright.tools.processes import BenchError
from meshwright.train.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to which a calibration writes."""
    monkeypatch.setattr(calibrate, "HARDWARE_FOLDER", tmp_path)
    return tmp_path


def test_a_file_is_not_overwritten_unasked(folder: Path) -> None:
    path = folder / "here.yaml"
    path.write_text("mine")
    with pytest.raises(BenchError, match=r"here\.yaml exists.*--overwrite.*--name"):
        main(["--name=here"])
    assert path.read_text() == "mine"


def test_a_base_that_is_not_there_is_told_before_anything_is_measured(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configs/hardware/h100\.yaml\. Did you mean h100-sxm"):
        main(["--name=x", "--base=h100"])
    assert not list(folder.iterdir())


def test_a_gpu_of_no_known_kind_needs_a_base() -> None:
    with pytest.raises(BenchError, match=r"Some GPU: no file in configs/hardware.*--base .*h200"):
        find_base(None, "cuda", "Some GPU")
    assert find_base("h200", "cuda", "Some GPU").name == "h200"
    assert find_base(None, "cuda", "NVIDIA H200").name == "h200"


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.usefixtures("forked_commands")
def test_a_real_calibration_is_read_by_the_planner(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--name=here", "--json"])
    figures = json.loads(capsys.readouterr().out)
    hardware = read_hardware(folder / figures["file"])
    assert figures["measured"]["compute"]["copy_bytes_s"] > 0
    assert hardware.peak_tflops["float32"] > 1e-3
    assert hardware.matmul["float32"] == 1, "the rate of products is the peak"
    assert 0 < hardware.host.operator_s < 1e-3
    assert set(hardware.collectives_s) == {*COLLECTIVES, ALL_TO_ALL}
    assert all(set(by_ranks) == {2, 4} for by_ranks in hardware.collectives_s.values())
    base = load_hardware()["cpu"]
    assert (hardware.node, hardware.network) == (base.node, base.network)
