"""The hardware file of a calibration: every key with its source, and the values derived from measurements."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from meshwright.parallel.planner.hardware import COLLECTIVES, load_hardware, read_hardware, share_at
from meshwright.train.calibration.collectives import CollectiveTiming
from meshwright.train.calibration.hardware_file import (
    CalibratedMachine,
    CalibrationResult,
    SourcedValue,
    copy_share,
    hardware_text,
    host_costs,
    measured_values,
    product_curves,
    source_in,
)
from meshwright.train.calibration.host import EVENTS, UnitTiming


@pytest.mark.parametrize("value", [0.0, 5e-6, 1.0, 3350.0, 123456.0, 1e22, 0.00012345])
def test_numbers_are_read_back_as_floats(value: float) -> None:
    cpu = vars(load_hardware()["cpu"]) | {"memory_gib": value}
    text = hardware_text("a title", {key: SourcedValue(known, "a source") for key, known in cpu.items()})
    read = yaml.safe_load(text)["memory_gib"]
    assert isinstance(read, float)
    assert read == pytest.approx(value, rel=1e-3)


def test_a_written_file_is_read_as_it_was_given(tmp_path: Path) -> None:
    hardware, path = load_hardware()["h100-sxm"], tmp_path / "machine.yaml"
    keys = [item.name for item in dataclasses.fields(hardware)]
    values = {key: SourcedValue(getattr(hardware, key), f"source of {key}") for key in keys}
    path.write_text(hardware_text("a title", values))
    read = read_hardware(path)
    assert read.device_names == hardware.device_names
    assert read.node.latency_s == pytest.approx(hardware.node.latency_s)
    assert read.cores == hardware.cores
    for dtype, curve in hardware.matmul.items():
        assert share_at(read.matmul[dtype], 50) == pytest.approx(share_at(curve, 50), rel=1e-3)
    assert all(source_in(path, key) == f"source of {key}" for key in keys if key != "name")


def test_products_are_medians_over_processes_and_equal_sizes() -> None:
    compute = [
        {"matmul": {"float32": [(2.0, 10.0), (1.0, 5.0), (2.0, 20.0)]}},
        {"matmul": {"float32": [(2.0, 30.0), (1.0, 7.0), (2.0, 20.0)]}},
    ]
    assert product_curves(compute) == {"float32": [(1.0, 6.0), (2.0, 20.0)]}


COMPUTE = {
    "matmul": {"bfloat16": [(1.0, 2e11), (4.0, 4e11)]},
    "attention_forward": {"bfloat16": 1e11},
    "attention_backward": {"bfloat16": 5e10},
    "copy_bytes_s": 2e10,
    "memory_bytes_s": {"bfloat16": 5e9},
    "optimizer_bytes_s": 3e10,
    "operation_s": 1e-6,
    "operator_s": 4e-6,
    "graph_s": 6e-5,
    "kernel_s": 3e-6,
    "taken_gib": 0.5,
}
TIMINGS = [  # a millisecond at every size
    CollectiveTiming(op, 2, size, 1e-3) for op in COLLECTIVES for size in (4, 2**22)
]


def unit_timing(values: int, seconds: float) -> UnitTiming:
    return UnitTiming(values, 2, 2, seconds, waits=True)


def test_fsdp_costs_are_what_the_collectives_do_not_explain() -> None:
    # a tiny unit: two all-gathers and a reduce-scatter of 1 ms, and 0.2 ms for each of them in FSDP2
    tiny, large = unit_timing(1, 3e-3 + EVENTS * 2e-4), unit_timing(2**20, 0.0)
    copies_s = large.copied_bytes / 1e10  # at half of the copy rate
    large = dataclasses.replace(large, seconds=3e-3 + EVENTS * 2e-4 + copies_s)
    result = CalibrationResult([COMPUTE], TIMINGS, [tiny, large])
    assert host_costs(result).unit_s == pytest.approx(2e-4, rel=1e-6)
    assert copy_share(result, 2e10, 2) == pytest.approx(0.5)
    # two processes on one core took turns
    assert host_costs(result, cores=1).unit_s == pytest.approx(1e-4)
    assert copy_share(result, 2e10, cores=1) == pytest.approx(1.0)
    # collectives that took longer when they were timed alone
    short = CalibrationResult([COMPUTE], TIMINGS, [dataclasses.replace(tiny, seconds=1e-3)] * 2)
    assert host_costs(short).unit_s == 0.0
    assert copy_share(short, 2e10, 2) == 1.0


def test_a_file_of_this_machine_says_what_was_measured(tmp_path: Path) -> None:
    base, path = load_hardware()["cpu"], tmp_path / "here.yaml"
    tiny, large = unit_timing(1, 4e-3), unit_timing(2**20, 2e-2)
    machine = CalibratedMachine("cpu", "a CPU", count=4, threads=2)
    path.write_text(
        hardware_text(
            "a title", measured_values(machine, CalibrationResult([COMPUTE], TIMINGS, [tiny, large]), base)
        )
    )
    read = read_hardware(path)
    # rates are of one core, and the process had two
    assert read.peak_tflops == {"bfloat16": pytest.approx(0.2), "float32": base.peak_tflops["float32"]}
    assert read.memory_gb_s == pytest.approx(10.0)
    assert read.memory_efficiency == {"bfloat16": 0.25, "float32": 0.25}
    assert read.attention_backward["bfloat16"] == pytest.approx(0.125)
    assert share_at(read.matmul["bfloat16"], 1.0) == pytest.approx(0.5)
    assert read.matmul["float32"] == base.matmul["float32"]
    assert (read.operation_s, read.host.operator_s, read.host.graph_s) == (0.0, 4e-6, 6e-5)
    assert read.collectives_s["all_gather"][2][-1][0] == pytest.approx(2**22, rel=1e-3)
    assert read.reserved_gib == 0.5
    assert "float32: as in cpu.yaml" in source_in(path, "matmul")
    assert "float32: as bfloat16" in source_in(path, "memory_efficiency")
