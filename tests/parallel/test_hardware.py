"""Device kinds: every file loads, and an unknown device gets no guess."""

import re
from pathlib import Path

import pytest

from parallel.planner.hardware import HARDWARE_FOLDER, find_hardware, load_hardware

FILES = sorted(HARDWARE_FOLDER.glob("*.yaml"))


def test_every_file_is_a_kind() -> None:
    assert len(FILES) >= 3
    assert list(load_hardware()) == [path.stem for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_kind_has_plausible_numbers(path: Path) -> None:
    kind = load_hardware()[path.stem]
    assert kind.name == path.stem
    assert isinstance(kind.memory_gib, float)
    assert 1 < kind.memory_gib < 1000
    assert {"bfloat16", "float32"} <= kind.peak_tflops.keys()
    assert all(isinstance(rate, float) and 1 < rate < 10_000 for rate in kind.peak_tflops.values())
    assert kind.peak_tflops["bfloat16"] > kind.peak_tflops["float32"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_number_has_its_source_in_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    sections = [line for line in lines if re.match(r"[a-z]", line)]
    assert all("#" in line for line in sections), "each top-level key says where its value comes from"


def test_a_known_device_is_found_by_the_name_torch_gives_it() -> None:
    for kind in load_hardware().values():
        assert [find_hardware(name) for name in kind.device_names] == [kind] * len(kind.device_names)


def test_no_device_is_two_kinds() -> None:
    names = [name for kind in load_hardware().values() for name in kind.device_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["CPU (no GPU)", "", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "nvidia h200"])
def test_an_unknown_device_gets_no_guess(name: str) -> None:
    assert find_hardware(name) is None
