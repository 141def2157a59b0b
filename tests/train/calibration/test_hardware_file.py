"""The hardware file of a measured machine: the values derived from measurements, and the others."""

from pathlib import Path

import pytest

from meshwright.parallel.planner.hardware import COLLECTIVES, load_hardware, read_hardware
from meshwright.train.calibration.measure import Calibration, hardware_text

COMPUTE = {
    "matmul": {"bfloat16": 4e11},
    "attention": {"bfloat16": [1e11, 5e10]},
    "copy_bytes_s": 2e10,
    "memory_bytes_s": {"bfloat16": 5e9},
    "optimizer_bytes_s": 3e10,
    "operator_s": 4e-6,
    "taken_gib": 0.5,
}
# a millisecond at every size
COLLECTIVES_S = {op: {2: ((4.0, 1e-3), (2.0**22, 1e-3))} for op in COLLECTIVES}


def calibration() -> Calibration:
    return Calibration("cpu", "a CPU", 4, 1, COMPUTE, COLLECTIVES_S)


def test_a_written_file_is_read_as_it_was_measured(tmp_path: Path) -> None:
    base, path = load_hardware()["cpu"], tmp_path / "here.yaml"
    path.write_text(hardware_text("a title", calibration(), base))
    read = read_hardware(path)
    assert read.peak_tflops == {"bfloat16": pytest.approx(0.4), "float32": base.peak_tflops["float32"]}
    assert read.memory_gb_s == pytest.approx(20.0)
    assert read.memory_efficiency == {"bfloat16": 0.25, "float32": 0.25}
    assert read.attention["cpu"]["bfloat16"] == (0.25, 0.125)
    slower = [base.attention["flash"]["bfloat16"][i] / base.attention["cpu"]["bfloat16"][i] for i in (0, 1)]
    assert read.attention["flash"]["bfloat16"] == pytest.approx(
        (0.25 * slower[0], 0.125 * slower[1]), rel=1e-3
    )
    assert (read.matmul["bfloat16"], read.copy_efficiency) == (1.0, 1.0)
    # the other costs of the host are in proportion to that of an operator
    slower = 4e-6 / base.host.operator_s
    for name, cost in vars(base.host).items():
        assert getattr(read.host, name) == pytest.approx(cost * slower, rel=1e-3)
    assert read.collectives_s["all_gather"][2][-1][0] == pytest.approx(2**22, rel=1e-3)
    assert read.reserved_gib == 0.5
    for key in ("node", "network", "slowdown"):
        assert getattr(read, key) == getattr(base, key)
    assert read.matmul["float32"] == base.matmul["float32"]
    lines = path.read_text().splitlines()
    assert lines[0] == "# a title"
    assert any(line.startswith("# float32: as in cpu.yaml") for line in lines)
    assert any(line.startswith("# As in cpu.yaml: ") and "slowdown" in line for line in lines)
