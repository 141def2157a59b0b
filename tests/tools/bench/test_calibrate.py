"""tools.bench calibrate: its options, and a real calibration whose file the planner reads."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from meshwright.parallel.planner.hardware import (
    ALL_TO_ALL,
    COLLECTIVES,
    HARDWARE_FOLDER,
    load_hardware,
    read_hardware,
)
from meshwright.tools.bench.calibrate import command
from meshwright.tools.bench.calibrate.command import add_calibrate_options, calibrate, find_base
from meshwright.tools.processes import BenchError
from meshwright.train.calibration.hardware_file import CalibratedMachine, source_in
from meshwright.train.errors import ConfigError


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_calibrate_options(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to which a calibration writes."""
    monkeypatch.setattr(command, "HARDWARE_FOLDER", tmp_path)
    return tmp_path


def test_a_file_is_not_overwritten_unasked(folder: Path) -> None:
    path = folder / "here.yaml"
    path.write_text("mine")
    with pytest.raises(BenchError, match=r"here\.yaml exists.*--overwrite.*--name"):
        calibrate(options_of("--name=here"), [])
    assert path.read_text() == "mine"


def test_a_base_that_is_not_there_is_told_before_anything_is_measured(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configs/hardware/h100\.yaml\. Did you mean h100-sxm"):
        calibrate(options_of("--name=x", "--base=h100"), [])
    assert not list(folder.iterdir())


def test_a_gpu_of_no_known_kind_needs_a_base() -> None:
    unknown = CalibratedMachine("cuda", "Some GPU", 1)
    with pytest.raises(BenchError, match=r"Some GPU: no file in configs/hardware.*--base .*h200"):
        find_base(None, unknown)
    assert find_base("h200", unknown).name == "h200"
    assert find_base(None, dataclasses.replace(unknown, name="NVIDIA H200")).name == "h200"


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.usefixtures("forked_commands")
def test_a_real_calibration_is_read_by_the_planner(folder: Path) -> None:
    path = folder / "here.yaml"
    result = calibrate(options_of("--name=here", "--quick"), [])
    json.dumps(result.figures)
    hardware = read_hardware(path)
    assert path.read_text() in result.text
    assert hardware.peak_tflops["float32"] > 1e-3
    # the peak is the best product
    assert max(share for _, share in hardware.matmul["float32"]) == pytest.approx(1)
    assert 0 < hardware.host.operator_s < 1e-3
    assert 0 < hardware.host.graph_s < 1e-1
    assert set(hardware.collectives_s) == {*COLLECTIVES, ALL_TO_ALL}
    assert all(set(by_ranks) == {2, 4} for by_ranks in hardware.collectives_s.values())
    assert {size for size, _ in hardware.node.efficiency["all_reduce"]} == {2, 4}
    assert source_in(path, "peak_tflops").startswith("measured 20")
    assert torch.__version__ in source_in(path, "peak_tflops")
    assert hardware.network == load_hardware()["cpu"].network
    assert source_in(path, "network").startswith("as in cpu.yaml: ")
    assert source_in(HARDWARE_FOLDER / "cpu.yaml", "network")
