"""The hardware file of a measured machine: the values derived from measurements, and the others."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.planner.hardware import COLLECTIVES, load_hardware, read_hardware, share_at
from meshwright.train.calibration.fsdp_unit import EVENTS, UnitTiming
from meshwright.train.calibration.hardware_file import (
    Calibration,
    copy_share,
    hardware_text,
    host_costs,
    measured_values,
)

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
# a millisecond at every size
COLLECTIVES_S = {op: {2: ((4.0, 1e-3), (2.0**22, 1e-3))} for op in COLLECTIVES}


def calibration(
    units: Sequence[UnitTiming],
    compute: Sequence[dict[str, Any]] = (COMPUTE,),
    cores: int = 4,
    threads: int = 1,
) -> Calibration:
    return Calibration("cpu", "a CPU", cores, compute, COLLECTIVES_S, units, threads)


def unit_timing(values: int, seconds: float) -> UnitTiming:
    return UnitTiming(2, 2 * values, 4 * values, seconds)


UNITS = unit_timing(1, 4e-3), unit_timing(2**20, 2e-2)


def test_products_are_medians_over_processes_and_equal_sizes() -> None:
    rates = [[(2.0, 1e12), (1.0, 5e11), (2.0, 2e12)], [(2.0, 3e12), (1.0, 7e11), (2.0, 2e12)]]
    measured = calibration(UNITS, [COMPUTE | {"matmul": {"bfloat16": products}} for products in rates])
    values = measured_values(measured, load_hardware()["cpu"])
    assert values["peak_tflops"]["bfloat16"] == pytest.approx(2.0)
    assert values["matmul"]["bfloat16"] == [(1.0, pytest.approx(0.3)), (2.0, pytest.approx(1.0))]


def test_fsdp_costs_are_what_the_collectives_do_not_explain() -> None:
    # a tiny unit: two all-gathers and a reduce-scatter of 1 ms, and 0.2 ms for each of them in FSDP2
    tiny, large = unit_timing(1, 3e-3 + EVENTS * 2e-4), unit_timing(2**20, 0.0)
    copies_s = large.copied_bytes / 1e10  # at half of the copy rate
    large = dataclasses.replace(large, seconds=3e-3 + EVENTS * 2e-4 + copies_s)
    apart, together = (calibration([tiny, large], cores=cores) for cores in (2, 1))
    assert host_costs(apart).unit_s == pytest.approx(2e-4, rel=1e-6)
    assert copy_share(apart, 2e10) == pytest.approx(0.5)
    # two processes on one core took turns
    assert host_costs(together).unit_s == pytest.approx(1e-4)
    assert copy_share(together, 2e10) == pytest.approx(1.0)
    # collectives that took longer when they were timed alone
    short = calibration([dataclasses.replace(tiny, seconds=1e-3)] * 2)
    assert host_costs(short).unit_s == 0.0
    assert copy_share(short, 2e10) == 1.0


def test_a_written_file_is_read_as_it_was_measured(tmp_path: Path) -> None:
    base, path = load_hardware()["cpu"], tmp_path / "here.yaml"
    path.write_text(hardware_text("a title", calibration(UNITS, threads=2), base))
    read = read_hardware(path)
    # rates are of one core, and the process had two
    assert read.peak_tflops == {"bfloat16": pytest.approx(0.2), "float32": base.peak_tflops["float32"]}
    assert read.memory_gb_s == pytest.approx(10.0)
    assert read.memory_efficiency == {"bfloat16": 0.25, "float32": 0.25}
    assert read.attention_backward["bfloat16"] == pytest.approx(0.125)
    assert share_at(read.matmul["bfloat16"], 1.0) == pytest.approx(0.5)
    assert (read.operation_s, read.host.operator_s, read.host.graph_s) == (0.0, 4e-6, 6e-5)
    assert read.collectives_s["all_gather"][2][-1][0] == pytest.approx(2**22, rel=1e-3)
    assert read.reserved_gib == 0.5
    for key in ("network", "slowdown", "attention_kernels"):
        assert getattr(read, key) == getattr(base, key)
    assert read.matmul["float32"] == base.matmul["float32"]
    lines = path.read_text().splitlines()
    assert lines[0] == "# a title"
    assert any(line.startswith("# float32: as in cpu.yaml") for line in lines)
    assert any(line.startswith("slowdown: 0.0  # no computation overlaps") for line in lines), (
        "with its source"
    )
