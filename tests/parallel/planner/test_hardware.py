"""Machine kinds: every file loads, mistakes are named, and an unknown device has no kind."""

from pathlib import Path

import pytest

from meshwright.parallel.planner.hardware import (
    HARDWARE_FOLDER,
    find_hardware,
    load_hardware,
    read_hardware,
    share_at,
)
from meshwright.parallel.yaml_io import YamlError

FILES = sorted(HARDWARE_FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_kind_has_plausible_numbers(path: Path) -> None:
    kind = load_hardware()[path.stem]
    assert kind.name == path.stem
    assert 1 < kind.memory_gib < 1000
    assert {"bfloat16", "float32"} <= kind.peak_tflops.keys()
    assert all(isinstance(rate, float) and 0.001 < rate < 10_000 for rate in kind.peak_tflops.values())
    assert kind.peak_tflops["bfloat16"] > kind.peak_tflops["float32"]
    curves = [*kind.node.efficiency.values(), *kind.network.efficiency.values(), kind.attention_head_dim]
    assert all(0 < share_at(curve, size) <= 1 for curve in curves for size in (1, 1e3, 1e6))
    shares = [*kind.matmul.values(), *kind.memory_efficiency.values(), kind.power_limit]
    shares += [share for kernel in kind.attention.values() for both in kernel.values() for share in both]
    assert all(0 < share <= 1 for share in shares)
    assert 0 <= kind.network_slowdown <= kind.slowdown < 0.5
    assert 0 <= kind.reserved_share < 0.8
    assert 0.5 < kind.reached <= 1
    assert kind.network.gb_s < kind.node.gb_s * 8
    assert 0 < kind.node.latency_s < 1e-3
    assert 0 < kind.network.latency_s < 1e-3
    if not kind.cores:  # of a CPU the network is not measured
        assert kind.node.latency_s <= kind.network.latency_s
        assert kind.overlaps
        assert 500 < kind.memory_gb_s < 10_000
        assert kind.node.gb_s >= 32  # PCIe


def test_a_known_device_is_found_by_the_name_torch_gives_it() -> None:
    for kind in load_hardware().values():
        assert [find_hardware(name) for name in kind.device_names] == [kind] * len(kind.device_names)


@pytest.mark.parametrize(
    "name", ["CPU (no GPU)", "", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "nvidia h200"]
)
def test_an_unknown_device_gets_no_guess(name: str) -> None:
    assert find_hardware(name) is None


def test_a_curve_is_interpolated_over_the_logarithm_and_ends_flat() -> None:
    curve = ((1.0, 0.2), (100.0, 0.6), (1000.0, 0.9))
    sizes = (0.1, 1.0, 10.0, 100.0, 1000.0, 1e6)
    assert [share_at(curve, size) for size in sizes] == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.9, 0.9])
    assert share_at(((1.0, 0.8),), 1e9) == 0.8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gb_s:", "memory_gbs:", "unknown key memory_gbs. Did you mean memory_gb_s?"),
        ("slowdown: 0.16", "", "slowdown is missing"),
        ("memory_gb_s: 3350.0", "memory_gb_s: 0", "memory_gb_s=0 must be a finite number greater than 0"),
        ("  gb_s: 450.0", "  gbs: 450.0", "node.gb_s is missing"),
        ("all_reduce: 0.8", "broadcast: 0.8", "unknown key node.efficiency.broadcast"),
        ("[[64, 0.69], ", "[[200, 0.69], ", "attention_head_dim: sizes must be in ascending order: [200.0"),
        ("  float8: 1978.9\n", "", "matmul.float8: peak_tflops has no key float8"),
        ("memory_efficiency: {float32: 0.9,", "memory_efficiency: {", "memory_efficiency.float32 is missing"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = change(tmp_path, old, new)
    with pytest.raises(YamlError) as error:
        read_hardware(path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}:")


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    path = change(tmp_path, "slowdown: 0.16", "slowdown: fast")
    path.write_text(path.read_text().replace("overlaps: true", "overlaps: often"))
    with pytest.raises(YamlError, match=r"(?s)overlaps=.* must be.*slowdown=.* must be"):
        read_hardware(path)


def change(folder: Path, old: str, new: str) -> Path:
    """Write a copy of a shipped file with one text replaced."""
    text = (HARDWARE_FOLDER / "h100-sxm.yaml").read_text()
    assert old in text
    path = folder / "machine.yaml"
    path.write_text(text.replace(old, new, 1))
    return path
